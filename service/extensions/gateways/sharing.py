"""Decides which shards a gateway takes or gives back. All decide from the same table, without messages.

Each gateway also has a lease on a row of its own, with a number below 0. No I/O: `keeper` acts on a decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from service.extensions.gateways.postgres.leases import Owned


class Decision(NamedTuple):
    """The shards that a gateway takes now, and the one that it gives back, or None."""

    take: list[int]
    give: int | None


def decide(table: Sequence[Owned], me: str) -> Decision:
    """The decision of gateway `me`. Free shards go to the gateways with the fewest; then shards are balanced.

    A gateway gives back its shard with the highest number.
    """
    shards = [row for row in table if row.shard >= 0]
    held = Counter({row.owner: 0 for row in table if row.shard < 0 and row.owner})
    # A stopping gateway has given back its own row, but may still have shards.
    held.update(row.owner for row in shards if row.owner in held)
    free = [row.shard for row in shards if not row.owner]
    if me not in held:
        return Decision([], None)
    take = []
    for shard in free:
        taker = min(held, key=lambda name: (held[name], name))
        held[taker] += 1
        if taker == me:
            take.append(shard)
    if free:
        return Decision(take, None)
    most, least = max(held.values()), min(held.values())
    giver = min(name for name, number in held.items() if number == most)
    if giver != me or most - least < 2:
        return Decision([], None)
    return Decision([], max(row.shard for row in shards if row.owner == me))
