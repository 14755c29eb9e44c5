"""Which gateway has a shard, and at which address the others reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ShardTable(Protocol):
    """Who owns which shard."""

    def address_of(self, shard: int) -> str | None:
        """The gRPC address of the owner, for gateways. None: nobody has it now."""

    def public_address_of(self, shard: int) -> str:
        """The address at which clients reach the owner and no other. Empty: there is none."""


class FixedTable:
    """The gateways of one host: each has one shard for ever, and a Unix socket that never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: by shard."""
        self._addresses = addresses

    def address_of(self, shard: int) -> str | None:
        """See `ShardTable.address_of`."""
        return self._addresses[shard]

    def public_address_of(self, shard: int) -> str:  # noqa: ARG002
        """See `ShardTable.public_address_of`: they share a port."""
        return ""
