"""Two gateways that want one shard: whatever breaks, what was told is what the next owner finds."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim import planted_in_shards
from tests.sim.planted import Plant, is_found, plants_of
from tests.sim.schedules import run_schedules
from tests.sim.shards import ShardSimulation

SCHEDULES = 240
CONTROL_SCHEDULES = 300
MUST_HAPPEN = (
    "shortened", "rows lost", "append behind lost rows refused",
    "append refused", "broken in the middle", "killed", "stored, but not answered", "taken over",
)  # fmt: skip


def test_what_was_told_is_what_the_next_owner_finds() -> None:
    seen: Counter[str] = run_schedules(range(SCHEDULES), ShardSimulation)
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 20} == {}


@pytest.mark.parametrize("bug", plants_of(planted_in_shards))
def test_a_planted_bug_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    is_found(bug, monkeypatch, CONTROL_SCHEDULES, ShardSimulation)
