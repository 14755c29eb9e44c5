"""Thousands of seeded schedules keep every promise, and a gateway with a planted bug does not.

A failure names its seed: `python -m tests.sim --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from service.caches.effects import Effect, ForwardSequence, Reply, Send
from service.caches.entries import AppliedAppend, CacheEntry, Operation
from service.caches.requests import Append, Release, Request
from service.caches.table import CacheTable
from service.dispatcher import Dispatcher
from tests.sim.schedules import ScheduleFailed, run_schedules

SCHEDULES = 3000
# A planted bug shows within this many; most within ten.
CONTROL_SCHEDULES = 1000
# Without these a passing run would say little.
MUST_HAPPEN = (
    "applied prefill",
    "applied decode",
    "applied verify",
    "fork",
    "truncation",
    "crash",
    "pause",
    "release behind others",
    "release of nothing",
    "renew behind others",
    "lease ran out",
    "release of one who has gone",
    "abort came too late",
    "abort of a begun forward",
    "abort of a queued forward",
    "a longer copy was cut",
    "repetition answered from memory",
    "repetition answered computed again",
    "repetition answered after a loss",
    "CACHE_LIMIT",
    "CACHE_LOST",
    "CACHE_NOT_FOUND",
    "DRAINING",
    "JOURNAL_FULL",
    "KV_EXHAUSTED",
    "NO_WORKER",
    "POSITION_MISMATCH",
    "QUEUE_FULL",
    "REQUEST_ID_REUSED",
    "SEQUENCE_TOO_LONG",
    "DEADLINE_PASSED",
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

    def unfenced(table: CacheTable, request: Request, now_s: float, caller: int, *tenant: Any) -> int:
        if isinstance(request, Append):
            request = dataclasses.replace(request, position=None)
        return submit(table, request, now_s, caller, *tenant)

    patch.setattr(CacheTable, "submit", unfenced)


def repetitions_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedAppend, "is_repeated_by", lambda *_: False)


def other_tokens_taken_for_a_repetition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AppliedAppend, "is_repeated_by", lambda last, _, position: position == last.base)


def request_ids_ignored(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def forgetful(table: CacheTable, request: Request, now_s: float, caller: int, *tenant: Any) -> int:
        table._by_request_id.clear()
        return submit(table, request, now_s, caller, *tenant)

    patch.setattr(CacheTable, "submit", forgetful)


def nothing_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_undo", lambda *_: None)


def copies_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_discard", lambda *_: None)


def losses_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def lost(table: CacheTable, worker_id: str, epoch: int, now_s: float) -> None:
        worker = table._placement.find(worker_id, epoch)
        assert worker is not None
        table._placement.remove(worker)

    patch.setattr(CacheTable, "worker_lost", lost)


def order_not_kept(patch: pytest.MonkeyPatch) -> None:
    advance = CacheTable._advance

    def last_first(table: CacheTable, entry: CacheEntry) -> None:
        entry.waiting.reverse()
        advance(table, entry)

    patch.setattr(CacheTable, "_advance", last_first)


def releases_overtake(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def at_once(table: CacheTable, request: Request, now_s: float, caller: int, *tenant: Any) -> int:
        entry = table._entries.get(request.cache_id)
        ticket = submit(table, request, now_s, caller, *tenant)
        if isinstance(request, Release) and entry is not None and entry.busy:
            table._close(entry)
        return ticket

    patch.setattr(CacheTable, "submit", at_once)


def tokens_lost_after_verify(patch: pytest.MonkeyPatch) -> None:
    """The table believes that all drafts were kept."""
    apply = CacheTable._apply_append

    def all_kept(table: CacheTable, operation: Operation, append: Append, done: object) -> None:
        apply(table, operation, append, done)  # type: ignore[arg-type]
        operation.entry.length = operation.base + len(append.token_ids)

    patch.setattr(CacheTable, "_apply_append", all_kept)


def wrong_position_sent(patch: pytest.MonkeyPatch) -> None:
    def one_early(**fields: Any) -> ForwardSequence:
        return ForwardSequence(**{**fields, "position": max(0, fields["position"] - 1)})

    patch.setattr("service.caches.table.ForwardSequence", one_early)


def effects_as(change: Callable[[list[Effect]], list[Effect]]) -> Plant:
    """A dispatcher that carries out other effects than those it was given."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        take = CacheTable.take_effects
        patch.setattr(CacheTable, "take_effects", lambda table: change(take(table)))

    return plant


replies_before_records = effects_as(lambda effects: sorted(effects, key=lambda e: not isinstance(e, Reply)))
sent_twice = effects_as(
    lambda effects: [
        e for e in effects for _ in range(1 + (isinstance(e, Send) and e.command.op_id % 8 == 0))
    ]
)


def cancelled_are_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "cancel", lambda *_: None)


def cancelled_oldest_first(patch: pytest.MonkeyPatch) -> None:
    def cancel(dispatcher: Dispatcher, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if dispatcher._waiting.pop(ticket, None) is not None:
                dispatcher._caches.cancel(ticket, dispatcher._clock_s())
        dispatcher._carry_out()

    patch.setattr(Dispatcher, "cancel", cancel)


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
        releases_overtake,
        tokens_lost_after_verify,
        wrong_position_sent,
        replies_before_records,
        sent_twice,
        cancelled_are_answered,
        cancelled_oldest_first,
    ],
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        run_schedules(range(CONTROL_SCHEDULES))
