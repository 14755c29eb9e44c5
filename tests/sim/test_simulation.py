"""Thousands of seeded schedules keep every promise, and a gateway with a planted bug does not.

A failure names its seed: `python -m tests.sim --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from service.caches.entries import AppliedAppend, CacheEntry, Operation
from service.caches.requests import Append, Request
from service.caches.table import CacheTable
from service.pool import commands
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
    submit = CacheTable.submit

    def unfenced(table: CacheTable, request: Request, now_s: float) -> int:
        if isinstance(request, Append):
            request = dataclasses.replace(request, position=None)
        return submit(table, request, now_s)

    patch.setattr(CacheTable, "submit", unfenced)


def repetitions_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedAppend, "is_repeated_by", lambda *_: False)


def other_tokens_taken_for_a_repetition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedAppend, "is_repeated_by", lambda last, _, position: position == last.base)


def request_ids_ignored(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def forgetful(table: CacheTable, request: Request, now_s: float) -> int:
        table._by_request_id.clear()
        return submit(table, request, now_s)

    patch.setattr(CacheTable, "submit", forgetful)


def nothing_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_undo", lambda *_: None)


def copies_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_discard", lambda *_: None)


def losses_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def lost(table: CacheTable, worker_id: str, epoch: int) -> None:
        del table._workers[worker_id]

    patch.setattr(CacheTable, "worker_lost", lost)


def order_not_kept(patch: pytest.MonkeyPatch) -> None:
    advance = CacheTable._advance

    def last_first(table: CacheTable, entry: CacheEntry) -> None:
        entry.waiting.reverse()
        advance(table, entry)

    patch.setattr(CacheTable, "_advance", last_first)


def steps_lost_after_verify(patch: pytest.MonkeyPatch) -> None:
    """The table believes that all drafts were kept."""
    apply = CacheTable._apply_append

    def all_kept(table: CacheTable, operation: Operation, step: Append, done: object) -> None:
        apply(table, operation, step, done)  # type: ignore[arg-type]
        operation.entry.length = operation.base + len(step.token_ids)

    patch.setattr(CacheTable, "_apply_append", all_kept)


def wrong_position_sent(patch: pytest.MonkeyPatch) -> None:
    forward = commands.forward

    def one_early(
        operation: Operation, step: Append, number: int, position: int, *, replay: bool = False
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
