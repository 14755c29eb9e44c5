"""How a gateway belongs to several: what `OneHost` and `SeveralHosts` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc

from service.api.admin import Stop
from service.extension import ServedShard
from service.extensions.gateways.peers import Addresses, Peers
from service.shard import OpenJournal, OpenShard


class RunningCore(Protocol):
    """The core of a further shard."""

    async def run(self) -> None:
        """Runs until cancelled, then gives the shard back. Raises OwnershipLost, PoolFailed."""

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls and waits for running ones. The workers keep their KV for the next owner."""

    def close(self) -> None:
        """Closes what is left."""


# Makes the core of a further shard, which answers calls from then on.
OpenCore = Callable[[OpenShard], RunningCore]


class Membership(Protocol):
    """Which shards this gateway has, and where the others are.

    Attributes:
        has_parent: See `Extension`.
        addresses: Of the other gateways. Change with the owners.
        listen: The address at which they reach this one.
        stop_all: See `OtherGateways`.
    """

    has_parent: bool
    addresses: Addresses
    peers: Peers
    listen: str
    stop_all: Stop | None

    async def open_home(self, open_journal: OpenJournal) -> OpenShard:
        """Opens the first shard, once this gateway has one. It has it until it ends. See `OpenHome`."""

    def add_port(self, server: grpc.aio.Server) -> int:
        """Binds `listen`. Returns the port."""

    async def run(self, open_core: OpenCore, stop: Stop) -> None:
        """Keeps further shards, until cancelled. Raises OwnershipLost. `stop`: see `GatewayParts`."""

    async def drain(self, home: ServedShard) -> None:
        """Gives further shards back, once their calls have ended. `home`: the first one."""
