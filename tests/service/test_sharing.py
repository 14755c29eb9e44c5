"""Gateways that share shards, each deciding alone: soon all are owned, and evenly, and nothing moves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from service.extensions.gateways.postgres.leases import Owned
from service.extensions.gateways.sharing import decide


def row(shard: int, owner: str) -> Owned:
    return Owned(shard, 1, owner, "address", 9.0 if owner else 0.0)


class Gateways:
    """Those of `names`; others have ended. Each looks at the table at its own times."""

    def __init__(self, names: list[str], owners: list[str], seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = names
        self.owners = dict(enumerate(owners))

    def table(self) -> list[Owned]:
        members = [row(-1 - at, name) for at, name in enumerate(self.names)]
        return members + [row(shard, owner) for shard, owner in self.owners.items()]

    def act(self) -> bool:
        """Each acts once, some by an older table. Returns whether anything has changed."""
        before = self.owners.copy()
        seen = self.table()
        for name in self.rng.sample(self.names, len(self.names)):
            if self.rng.random() < 0.5:
                seen = self.table()
            take, give = decide(seen, name)
            for shard in take:
                # A lease is taken only if it is free.
                if not self.owners[shard]:
                    self.owners[shard] = name
            if give is not None:
                assert self.owners[give] == name
                self.owners[give] = ""
        return self.owners != before


@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.integers(0, 1 << 30))
def test_all_shards_are_owned_soon_and_evenly(
    data: st.DataObject, members: int, shards: int, seed: int
) -> None:
    names = [f"gateway-{index}" for index in range(members)]
    # Nobody's, or a member's; a gateway that stops has no row below 0, and still has shards.
    owners = data.draw(st.lists(st.sampled_from(["", *names]), min_size=shards, max_size=shards))
    gateways = Gateways(names, owners, seed)
    rounds = 0
    while gateways.act():
        rounds += 1
        assert rounds <= 4 * shards + 4
    held = [list(gateways.owners.values()).count(name) for name in names]
    assert sum(held) == shards and max(held) - min(held) <= 1


def test_a_gateway_that_stops_gets_nothing_and_a_stranger_does_nothing() -> None:
    table = [row(-1, "a"), row(0, ""), row(1, "b"), row(2, "")]
    assert decide(table, "b") == ([], None), "it is no member any more"
    assert decide(table, "a") == ([0, 2], None)
    assert decide(table, "c") == ([], None)
