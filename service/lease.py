"""That a shard belongs to this gateway, and until when. With one gateway it always does."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol


class Lease(Protocol):
    """Changed by who keeps it.

    Attributes:
        valid_until_s: End of certain ownership, by the monotonic clock. Later, another gateway may own the
            shard.
    """

    valid_until_s: float


class FencedLease(Lease, Protocol):
    """The lease of a shard that gateways own one after the other, each with a fence above those before.

    Attributes:
        lease_id: Of the shard, for ever: the gateway's id for the shard's workers.
        first_epoch: The first epoch for leases of workers: above those of all earlier owners.
    """

    @property
    def lease_id(self) -> str: ...

    @property
    def first_epoch(self) -> int: ...


@dataclasses.dataclass
class Unlimited:
    """The ownership of a gateway that shares its journal with no other."""

    valid_until_s: float = math.inf
