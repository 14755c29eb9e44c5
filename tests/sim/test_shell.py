"""Hundreds of seeded schedules of the gateway but its sockets keep every promise; one with a bug does not.

A failure names its seed: `python -m tests.sim --shell --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from service.api.budget import AnswerBudget
from service.api.session import Session
from service.caches.table import CacheTable
from service.pool import supervisor as supervisor_module
from service.pool.base import WorkerSlot
from service.pool.crew import Crew
from service.pool.incarnation import Incarnation
from service.pool.liveness import Liveness
from service.pool.supervisor import Supervisor
from service.runtimes.loading import WeightsLoader
from tests.sim.schedules import ScheduleFailed, quietly, run_schedules
from tests.sim.shell import ShellSimulation

SCHEDULES = 200
# A planted bug shows within this many.
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
    "LOAD_FAILED",
    "session WEIGHTS_CHANGED",
)

Plant = Callable[[pytest.MonkeyPatch], None]


def test_every_schedule_keeps_every_promise() -> None:
    seen = run_schedules(range(SCHEDULES), ShellSimulation)
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 10} == {}


def test_a_schedule_can_be_had_again() -> None:
    traces = []
    for _ in range(2):
        simulation = ShellSimulation(7, Counter())
        with quietly():
            simulation.run()
        traces.append([repr(entry) for entry in simulation.trace])
    assert traces[0] == traces[1]


def pauses_count_as_silence(patch: pytest.MonkeyPatch) -> None:
    def beat(liveness: Liveness, elapsed_s: float) -> None:
        liveness._clock.now_s += elapsed_s

    patch.setattr(Liveness, "beat", beat)


def silence_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "end", lambda _: None)


def leases_do_not_run_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "expire", lambda *_: 0)


def failed_starts_are_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    run_once = Supervisor._run_once

    async def gives_up(supervisor: Supervisor, slot: WorkerSlot, crew: Crew) -> None:
        await run_once(supervisor, slot, crew)
        if slot.ready is None:
            await asyncio.get_running_loop().create_future()

    patch.setattr(Supervisor, "_run_once", gives_up)


def failed_starts_are_hammered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(supervisor_module, "_MAX_BACKOFF_S", 0.0)


def who_died_is_not_told_of(patch: pytest.MonkeyPatch) -> None:
    forget = Supervisor._forget

    def quietly_forget(supervisor: Supervisor, incarnation: Incarnation, *, crashed: bool) -> None:
        incarnation.slot.ready = None
        forget(supervisor, incarnation, crashed=crashed)

    patch.setattr(Supervisor, "_forget", quietly_forget)


def stalled_readers_calls_are_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_undo_open_calls", lambda _: None)


def stalled_readers_are_not_cut_off(patch: pytest.MonkeyPatch) -> None:
    async def patiently(writing: asyncio.Future[None], _stall_s: float) -> bool:
        await writing
        return True

    patch.setattr("service.api.session.is_read", patiently)


def a_pause_is_the_readers_fault(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.api.reading._STALL_PARTS", 1)


def sessions_are_read_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_has_room", lambda *_: True)


def answers_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    exchange = AnswerBudget.exchange

    def keeps(budget: AnswerBudget, promised_bytes: int, size_bytes: int) -> None:
        exchange(budget, promised_bytes, max(size_bytes, 0))

    patch.setattr(AnswerBudget, "exchange", keeps)


def those_taken_back_stay(patch: pytest.MonkeyPatch) -> None:
    async def no_one(*_: object) -> None:
        pass

    patch.setattr(WeightsLoader, "_take_back", no_one)


def a_dead_worker_is_switched_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Crew, "fail", lambda crew, _: crew._loaded.set())


@pytest.mark.parametrize(
    "plant",
    [
        those_taken_back_stay,
        a_dead_worker_is_switched_to,
        pauses_count_as_silence,
        silence_is_not_noticed,
        leases_do_not_run_out,
        failed_starts_are_not_tried_again,
        failed_starts_are_hammered,
        who_died_is_not_told_of,
        stalled_readers_calls_are_not_undone,
        stalled_readers_are_not_cut_off,
        a_pause_is_the_readers_fault,
        sessions_are_read_without_end,
        answers_keep_their_bytes,
    ],
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        run_schedules(range(CONTROL_SCHEDULES), ShellSimulation)
