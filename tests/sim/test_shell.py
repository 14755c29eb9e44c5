"""Seeded schedules of the gateway but its sockets keep every promise; one with a bug does not.

A failure names its seed: `python -m tests.sim --shell --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import pytest

from tests.sim import planted_in_leases, planted_in_shell
from tests.sim.planted import Plant, is_found, plants_of
from tests.sim.schedules import run_schedules
from tests.sim.shell import ShellSimulation

# How many, and how often all of what must happen has to.
SCHEDULES = [(50, 2), pytest.param(100, 5, marks=pytest.mark.thorough)]
# A planted bug shows within this many; the last within 40.
CONTROL_SCHEDULES = 60
# Without these a passing run would say little.
MUST_HAPPEN = (
    "applied decode",
    "applied prefill",
    "applied verify",
    "fork",
    "crash",
    "hang",
    "suspected",
    "heard again",
    "pause",
    "lease ran out",
    "spawn refused",
    "death while loading",
    "never loads",
    "tried again",
    "reader cut off",
    "a reader who stays away",
    "session answer",
    "session ANSWERS_FULL",
    "session JOURNAL_FULL",
    "session NO_WORKER",
    "session JOURNAL_UNAVAILABLE",
    "answered after a replay",
    "journal failed",
    "weights switched",
    "rebuilt",
    "link cut",
    "leased again",
    "message of an earlier lease",
    "adopted as it is",
    "LOAD_FAILED",
    "session WEIGHTS_CHANGED",
)


@pytest.mark.parametrize(("schedules", "least"), SCHEDULES)
def test_every_schedule_keeps_every_promise(schedules: int, least: int) -> None:
    seen = run_schedules(range(schedules), ShellSimulation)
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < least} == {}


@pytest.mark.parametrize(
    "bug", [bug for module in (planted_in_shell, planted_in_leases) for bug in plants_of(module)]
)
def test_a_planted_bug_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    is_found(bug, monkeypatch, CONTROL_SCHEDULES, ShellSimulation)
