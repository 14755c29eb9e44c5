"""Thousands of seeded schedules keep every promise, and a gateway with a planted bug does not.

A failure names its seed: `python -m tests.sim --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from service.caches.requests import PreviousCaches
from service.caches.states import NEXT
from tests.sim import planted_in_bytes, planted_in_caches, planted_in_workers
from tests.sim.machine import PlantedMachine
from tests.sim.planted import Plant, is_found, plant, plants_of
from tests.sim.schedules import Kind, quietly, run_schedules, without_addresses
from tests.sim.shell import ShellSimulation
from tests.sim.simulation import Simulation
from tests.sim.states import SEEN

SCHEDULES, THOROUGH_SCHEDULES = 800, 10_000
# A planted bug shows within this many; most within ten.
CONTROL_SCHEDULES = 3000
# Without these a passing run would say little.
MUST_HAPPEN = (
    "applied prefill",
    "applied decode",
    "applied verify",
    "a path of a tree",
    "repeated tree",
    "fork",
    "fork repeated",
    "forks of several",
    "forks of several repeated",
    "fork that waits for its last turn",
    "truncation",
    "crash",
    "pause",
    "release",
    "release of nothing",
    "lease ran out",
    "done for one who has gone",
    "abort came too late",
    "abort of a begun forward",
    "abort of a queued forward",
    "a longer copy was cut",
    "late answer",
    "poisoned",
    "drained",
    "answered after a replay",
    "computing when its worker died",
    "replaying when its worker died",
    "parked when a worker died",
    "waiting when a worker died",
    "committing when a worker died",
    "cancelled while waiting",
    "cancelled while parked",
    "cancelled while replaying",
    "cancelled while computing",
    "cancelled while committing",
    "gateway crash",
    "in flight when the gateway crashed",
    "asked again after a gateway crash",
    "durable, but not answered",
    "torn frame",
    "commits that shared a frame",
    "journal failed",
    "adopted as it is",
    "adopted longer",
    "adopted not: other tokens",
    "not adopted",
    *(f"weights replaced, caches: {previous.name}" for previous in PreviousCaches),
    "in flight when weights were replaced",
    "gateway crash between a switch that is written down and its making",
    "KV of a cache dropped",
    "repetition answered from memory",
    "repetition answered computed again",
    "repetition answered after a gateway crash",
    "CACHE_LIMIT",
    "CACHE_NOT_FOUND",
    "DRAINING",
    "JOURNAL_FULL",
    "JOURNAL_UNAVAILABLE",
    "KV_EXHAUSTED",
    "NO_WORKER",
    "OVERLOADED",
    "POSITION_MISMATCH",
    "QUEUE_FULL",
    "REQUEST_ID_REUSED",
    "SEQUENCE_QUARANTINED",
    "SEQUENCE_TOO_LONG",
    "DEADLINE_PASSED",
    "TRUNCATE_BEYOND_END",
    "WEIGHTS_CHANGED",
    "WORKER_FAULT",
)


def test_every_schedule_keeps_every_promise() -> None:
    seen = run_schedules(range(SCHEDULES))
    assert {what for what in MUST_HAPPEN if not seen[what]} == set()
    possible = {(before, after) for before, to in NEXT.items() for after in to}
    assert possible <= SEEN, "the table of states allows what happens, and nothing else"


@pytest.mark.thorough  # The others of the schedules above.
def test_ten_thousand_schedules_keep_every_promise() -> None:
    seen = run_schedules(range(THOROUGH_SCHEDULES))
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 20} == {}


@pytest.mark.parametrize("kind", [Simulation, ShellSimulation])
def test_a_schedule_can_be_had_again(kind: Kind) -> None:
    traces = []
    for _ in range(2):
        simulation = kind(7, Counter())
        with quietly():
            simulation.run()
        traces.append([without_addresses(entry) for entry in simulation.trace])
    assert traces[0] == traces[1]


def test_a_machine_that_is_only_looked_through_breaks_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what is found of a planted one is its bug."""
    plant(PlantedMachine, monkeypatch)
    run_schedules(range(100))


@pytest.mark.parametrize(
    "bug",
    [
        bug
        for module in (planted_in_bytes, planted_in_caches, planted_in_workers)
        for bug in plants_of(module)
    ],
)
def test_a_planted_bug_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    is_found(bug, monkeypatch, CONTROL_SCHEDULES)
