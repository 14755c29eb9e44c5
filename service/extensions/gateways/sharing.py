"""How gateways share the shards among them. Each decides by the same table, so they need not talk.

Gateways have leases, too: on the rows below 0, each on one. Without I/O: `keeper` acts on what this says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from service.extensions.gateways.postgres.leases import Owned


class Decision(NamedTuple):
    """The shards that a gateway takes now, and one to give back, or None."""

    take: list[int]
    give: int | None


def decide(table: Sequence[Owned], me: str) -> Decision:
    """What one gateway does. Free shards go to those that have the fewest; then the others even out.

    Of shards to give back, the one with the highest number is chosen.
    """
    shards = [row for row in table if row.shard >= 0]
    held = Counter({row.owner: 0 for row in table if row.shard < 0 and row.owner})
    # A gateway that stops is no member any more, although it still has shards.
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
