"""The lease of a shard: until when it belongs to this gateway."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(eq=False, kw_only=True)
class Lease:
    """Changed by who keeps it. That of a gateway which shares its journal with no other never ends.

    Attributes:
        valid_until_s: End of certain ownership, by the monotonic clock. Later, another gateway may own the
            shard.
    """

    valid_until_s: float = math.inf


@dataclasses.dataclass(eq=False, kw_only=True)
class FencedLease(Lease):
    """The lease of a shard that gateways own one after the other, each with a fence above those before.

    Attributes:
        lease_id: Of the shard, for ever: the gateway's id for the shard's workers.
        first_epoch: The first epoch for leases of workers: above those of all earlier owners.
    """

    lease_id: str
    first_epoch: int
