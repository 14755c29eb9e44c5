"""Thousands of seeded schedules keep every promise, and a gateway with a planted bug does not.

A failure names its seed: `python -m tests.sim --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from service import commands
from service.entries import AppliedStep, Entry, Operation
from service.sequences import SequenceTable
from service.steps import Request, Step
from tests.sim.schedules import ScheduleFailed, run_schedules

SCHEDULES = 3000
# A planted bug shows within this many; most within ten.
CONTROL_SCHEDULES = 300
# Without these a passing run would say little.
MUST_HAPPEN = (
    "applied prefill",
    "applied decode",
    "applied verify",
    "fork",
    "truncation",
    "crash",
    "lease ran out",
    "abort came too late",
    "abort of a begun forward",
    "abort of a queued forward",
    "a longer copy was cut",
    "repetition answered from memory",
    "repetition answered computed again",
    "repetition answered after a loss",
    "CACHE_LOST",
    "CACHE_NOT_FOUND",
    "DRAINING",
    "KV_EXHAUSTED",
    "NO_WORKER",
    "POSITION_MISMATCH",
    "QUEUE_FULL",
    "REQUEST_ID_REUSED",
    "SEQUENCE_TOO_LONG",
    "STEP_TIMEOUT",
    "TRUNCATE_BEYOND_END",
    "WORKER_FAULT",
    "WORKER_LOST",
)

Plant = Callable[[pytest.MonkeyPatch], None]


def test_every_schedule_keeps_every_promise() -> None:
    seen = run_schedules(range(SCHEDULES))
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 20} == {}


def fencing_off(patch: pytest.MonkeyPatch) -> None:
    submit = SequenceTable.submit

    def unfenced(table: SequenceTable, request: Request, now_s: float) -> int:
        if isinstance(request, Step):
            request = dataclasses.replace(request, position=None)
        return submit(table, request, now_s)

    patch.setattr(SequenceTable, "submit", unfenced)


def repetitions_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedStep, "is_repeated_by", lambda *_: False)


def other_tokens_taken_for_a_repetition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedStep, "is_repeated_by", lambda last, _, position: position == last.base)


def request_ids_ignored(patch: pytest.MonkeyPatch) -> None:
    submit = SequenceTable.submit

    def forgetful(table: SequenceTable, request: Request, now_s: float) -> int:
        table._by_request_id.clear()
        return submit(table, request, now_s)

    patch.setattr(SequenceTable, "submit", forgetful)


def nothing_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceTable, "_undo", lambda *_: None)


def copies_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceTable, "_discard", lambda *_: None)


def losses_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def lost(table: SequenceTable, worker_id: str, epoch: int) -> None:
        del table._workers[worker_id]

    patch.setattr(SequenceTable, "worker_lost", lost)


def order_not_kept(patch: pytest.MonkeyPatch) -> None:
    advance = SequenceTable._advance

    def last_first(table: SequenceTable, entry: Entry) -> None:
        entry.waiting.reverse()
        advance(table, entry)

    patch.setattr(SequenceTable, "_advance", last_first)


def steps_lost_after_verify(patch: pytest.MonkeyPatch) -> None:
    """The table believes that all drafts were kept."""
    apply = SequenceTable._apply_step

    def all_kept(table: SequenceTable, operation: Operation, step: Step, done: object) -> None:
        apply(table, operation, step, done)  # type: ignore[arg-type]
        operation.entry.length = operation.base + len(step.token_ids)

    patch.setattr(SequenceTable, "_apply_step", all_kept)


def wrong_position_sent(patch: pytest.MonkeyPatch) -> None:
    forward = commands.forward

    def one_early(
        operation: Operation, step: Step, number: int, position: int, *, replay: bool = False
    ) -> object:
        return forward(operation, step, number, max(0, position - 1), replay=replay)

    patch.setattr(commands, "forward", one_early)


@pytest.mark.parametrize(
    "plant",
    [
        fencing_off,
        repetitions_not_recognised,
        other_tokens_taken_for_a_repetition,
        request_ids_ignored,
        nothing_undone,
        copies_not_released,
        losses_not_noticed,
        order_not_kept,
        steps_lost_after_verify,
        wrong_position_sent,
    ],
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        run_schedules(range(CONTROL_SCHEDULES))
