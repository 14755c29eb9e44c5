"""Ten thousand seeded schedules keep every promise, and a gateway with a planted bug does not.

A failure names its seed: `python -m tests.sim --seeds SEED` runs that schedule again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from service.caches.blame import blame
from service.caches.catalog import Catalog
from service.caches.computing import Computing
from service.caches.effects import (
    AbortForward,
    Effect,
    Event,
    ForwardDone,
    ForwardSequence,
    ReleaseSequences,
    Send,
    Write,
)
from service.caches.entries import CacheEntry, Operation, Phase
from service.caches.ledger import CacheState, Ledger, fingerprint
from service.caches.placement import Placement
from service.caches.records import CacheForked, Record
from service.caches.requests import Append, Fork, Release, Request, Truncate
from service.caches.table import CacheTable
from service.dispatcher import Dispatcher
from service.journal import encoding
from tests.sim import disk
from tests.sim.model_worker import ModelWorker
from tests.sim.schedules import ScheduleFailed, quietly, run_schedules
from tests.sim.simulation import Simulation
from tests.sim.watched import WatchedTable

SCHEDULES = 10_000
# A planted bug shows within this many; most within ten.
CONTROL_SCHEDULES = 1500
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
    "torn row",
    "commits that shared a row",
    "journal failed",
    "adopted as it is",
    "adopted longer",
    "adopted not: other tokens",
    "not adopted",
    "weights switched",
    "weights taken back",
    "in flight when weights were switched",
    "in flight when weights ended",
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

Plant = Callable[[pytest.MonkeyPatch], None]


def test_every_schedule_keeps_every_promise() -> None:
    seen = run_schedules(range(SCHEDULES))
    assert {what: seen[what] for what in MUST_HAPPEN if seen[what] < 20} == {}


def test_a_schedule_can_be_had_again() -> None:
    traces = []
    for _ in range(2):
        simulation = Simulation(7, Counter())
        with quietly():
            simulation.run()
        traces.append([repr(entry) for entry in simulation.trace])
    assert traces[0] == traces[1]


# Fencing and repetitions.


def fencing_off(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def unfenced(table: CacheTable, request: Request, *args: Any) -> int:
        if isinstance(request, Append | Truncate):
            request = dataclasses.replace(request, position=None)
        return submit(table, request, *args)

    patch.setattr(CacheTable, "submit", unfenced)


def repetitions_not_recognised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.caches.table.is_repeated", lambda *_: False)


def other_tokens_taken_for_a_repetition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.caches.table.is_repeated", lambda last, _, position: position == last.base)


def repetitions_not_recognised_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    recovered = CacheTable.recovered

    def forgetful(table: CacheTable, *args: Any, **kwargs: Any) -> None:
        recovered(table, *args, **kwargs)
        for state in table.ledger:
            state.last = None

    patch.setattr(CacheTable, "recovered", forgetful)
    # What is kept would show it at once; here callers are to.
    patch.setattr("tests.sim.watched.check_ledger", lambda *_: None)


def request_ids_of_creations_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "made_by", lambda *_: None)


def request_ids_of_forks_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "forked_by", lambda *_: None)


def repetitions_applied_once_more_after_a_death(patch: pytest.MonkeyPatch) -> None:
    lost = Computing.worker_lost

    def forgetful(computing: Computing, worker: Any, *, crashed: bool) -> list[CacheEntry]:
        for operation in computing.under_way(worker):
            operation.copy_number = None
        return lost(computing, worker, crashed=crashed)

    patch.setattr(Computing, "worker_lost", forgetful)


# The journal.


def answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    def commit(dispatcher: Dispatcher, writes: Sequence[Write]) -> None:
        dispatcher._journal.commit([r for w in writes for r in w.records], lambda _: None)
        dispatcher._on_committed([w.ticket for w in writes], durable=True)

    patch.setattr(Dispatcher, "_commit", commit)


def answered_without_a_journal(patch: pytest.MonkeyPatch) -> None:
    def commit(dispatcher: Dispatcher, writes: Sequence[Write]) -> None:
        dispatcher._on_committed([w.ticket for w in writes], durable=True)

    patch.setattr(Dispatcher, "_commit", commit)


def failed_writes_taken_for_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "write_failed", CacheTable.committed)


def torn_rows_accepted(patch: pytest.MonkeyPatch) -> None:
    decode = encoding.decode

    def until_it_breaks(row: bytes, seq: int, wall_ns: int) -> Iterator[Record]:
        patch.setattr(encoding, "_check_head", lambda *_: None)
        try:
            yield from decode(row, seq, wall_ns)
        except encoding.CorruptRecord:
            return

    patch.setattr(disk, "decode", until_it_breaks)


def checksums_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoding, "crc32", lambda *_: 0)


def tokens_lost_after_verify(patch: pytest.MonkeyPatch) -> None:
    """The journal is told that all drafts were kept."""

    def all_kept(**fields: Any) -> ForwardSequence:
        return ForwardSequence(**{**fields, "keep_all": True})

    patch.setattr("service.caches.computing.ForwardSequence", all_kept)


def a_tree_taken_for_its_first_tokens(patch: pytest.MonkeyPatch) -> None:
    """As many tokens as the path has are written down, but in the order of the request."""
    records_of = CacheTable._records_of

    def of_a_chain(
        table: CacheTable, operation: Operation, append: Append, done: ForwardDone
    ) -> Sequence[Record]:
        return records_of(table, operation, append, dataclasses.replace(done, path=range(done.kept)))

    patch.setattr(CacheTable, "_records_of", of_a_chain)


def trees_of_the_same_tokens_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.caches.entries.fingerprint", lambda tokens, _: fingerprint(tokens))
    patch.setattr("service.caches.table.fingerprint", lambda tokens, _=(): fingerprint(tokens))


# Workers.


def late_answers_accepted(patch: pytest.MonkeyPatch) -> None:
    """An answer to an earlier attempt is taken for that of the present one."""
    forward, answered = Computing._forward, Computing.worker_answered
    asked: dict[tuple[int, int], Operation] = {}

    def remember(computing: Computing, operation: Operation, *args: Any) -> None:
        forward(computing, operation, *args)
        assert operation.attempt is not None
        asked[id(computing), operation.attempt.op_id] = operation

    def accept(computing: Computing, event: Event) -> None:
        operation = asked.get((id(computing), event.op_id))
        if operation is not None and operation.attempt is not None:
            event = dataclasses.replace(event, op_id=operation.attempt.op_id)
        answered(computing, event)

    patch.setattr(Computing, "_forward", remember)
    patch.setattr(Computing, "worker_answered", accept)
    # That it does anything at all would show it at once; here its consequences are to.
    patch.setattr(Simulation, "check_late", lambda _: None)


def nothing_replayed(patch: pytest.MonkeyPatch) -> None:
    def believe(computing: Computing, operation: Operation) -> None:
        operation.entry.kv_len = operation.base
        computing._compute(operation)

    patch.setattr(Computing, "_replay", believe)


def replayed_without_the_tail(patch: pytest.MonkeyPatch) -> None:
    forward = Computing._forward

    def shorter(computing: Computing, operation: Operation, append: Append, *args: Any) -> None:
        if args[-1] is Phase.REPLAYING and len(append.token_ids) > 1:
            append = dataclasses.replace(append, token_ids=append.token_ids[:-1])
        forward(computing, operation, append, *args)

    patch.setattr(Computing, "_forward", shorter)


def wrong_tokens_replayed(patch: pytest.MonkeyPatch) -> None:
    forward = Computing._forward

    def other(computing: Computing, operation: Operation, append: Append, *args: Any) -> None:
        if args[-1] is Phase.REPLAYING:
            append = dataclasses.replace(append, token_ids=[0] * len(append.token_ids))
        forward(computing, operation, append, *args)

    patch.setattr(Computing, "_forward", other)
    # Callers are to see it.
    patch.setattr("tests.sim.watched.WatchedDispatcher.expect", lambda *_: None)


def wrong_position_sent(patch: pytest.MonkeyPatch) -> None:
    def one_early(**fields: Any) -> ForwardSequence:
        return ForwardSequence(**{**fields, "position": max(0, fields["position"] - 1)})

    patch.setattr("service.caches.computing.ForwardSequence", one_early)


def losses_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def lost(table: CacheTable, worker_id: str, epoch: int, *_: Any, **__: Any) -> None:
        worker = table._placement.find(worker_id, epoch)
        assert worker is not None
        table._placement.remove(worker)

    patch.setattr(CacheTable, "worker_lost", lost)


def adopted_unseen(patch: pytest.MonkeyPatch) -> None:
    """A worker keeps what is claimed of it without a look at the tokens."""
    patch.setattr(ModelWorker, "is_claimed", lambda *_: True)


def adopted_in_full(patch: pytest.MonkeyPatch) -> None:
    """A gateway claims all that a worker holds, be it more than the journal has."""
    claims = CacheTable.claims

    def all_of_it(table: CacheTable, holdings: Any) -> Any:
        return [dataclasses.replace(c, length=holdings[c.number]) for c in claims(table, holdings)]

    patch.setattr(CacheTable, "claims", all_of_it)
    patch.setattr(ModelWorker, "is_claimed", lambda *_: True)


def nobody_is_quarantined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.caches.computing.blame", lambda *_, **__: None)


def all_are_quarantined(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(entries: Iterable[CacheEntry], *, crashed: bool) -> None:
        entries = list(entries)
        blame(entries, crashed=crashed)
        for entry in entries:
            entry.quarantined = True

    patch.setattr("service.caches.computing.blame", all_of_them)


def the_parked_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Computing, "go_on", lambda _: None)


# Weights.


def computed_by_anybody(patch: pytest.MonkeyPatch) -> None:
    """A sequence goes to any worker, whatever it has loaded. Callers are to see it."""
    patch.setattr(Placement, "open_workers", lambda placement, _: [w for w in placement if not w.draining])
    patch.setattr(CacheTable, "check_invariants", lambda _: None)
    patch.setattr("tests.sim.watched.WatchedDispatcher.expect", lambda *_: None)


def caches_of_the_weights_before_used_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_can_use", lambda *_: True)


def checked_for_any_weights(patch: pytest.MonkeyPatch) -> None:
    """What was checked for other weights is computed with those there are."""
    require = CacheTable._require_weights

    def unchecked(table: CacheTable, entry: CacheEntry, request: Request) -> None:
        if isinstance(request, Append):
            request = dataclasses.replace(request, weights=None)
        require(table, entry, request)

    patch.setattr(CacheTable, "_require_weights", unchecked)


def weights_not_written_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoding, "_weights", lambda _: b"")
    # What is kept would show it at once; here callers are to.
    patch.setattr("tests.sim.watched.check_ledger", lambda *_: None)


def forks_are_of_the_present_weights(patch: pytest.MonkeyPatch) -> None:
    child_of = Ledger._child_of

    def of_the_first(*args: Any) -> CacheState:
        child = child_of(*args)
        child.weights = 0
        return child

    patch.setattr(Ledger, "_child_of", of_the_first)
    patch.setattr("tests.sim.watched.check_ledger", lambda *_: None)


def what_is_under_way_survives_its_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "weights_ended", lambda *_: None)


# Forks of several caches.


def forks_begin_at_their_first_turn(patch: pytest.MonkeyPatch) -> None:
    """One does not wait until its turn has come on all of its caches."""

    def at_once(operation: Operation) -> bool:
        for entry in operation.others:
            if operation in entry.waiting:
                entry.waiting.remove(operation)
                entry.running = operation
        return True

    patch.setattr(Operation, "has_turn", property(at_once))
    patch.setattr(CacheTable, "check_invariants", lambda _: None)


def forks_of_several_are_cut(patch: pytest.MonkeyPatch) -> None:
    """Only the first parent's children are written."""
    forked = CacheTable._forked
    patch.setattr(CacheTable, "_forked", lambda *args: list(forked(*args))[:1])


def forks_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def unfenced(table: CacheTable, request: Request, *args: Any) -> int:
        if isinstance(request, Fork):
            sources = [dataclasses.replace(source, position=None) for source in request.sources]
            request = dataclasses.replace(request, sources=sources)
        return submit(table, request, *args)

    patch.setattr(CacheTable, "submit", unfenced)


def places_in_a_fork_not_written_down(patch: pytest.MonkeyPatch) -> None:
    encode = encoding._encode_forked

    def nameless(record: CacheForked) -> bytes:
        return encode(dataclasses.replace(record, total=0, first=0))

    patch.setitem(encoding._ENCODERS, CacheForked, nameless)
    # What is kept would show it at once; here callers are to.
    patch.setattr("tests.sim.watched.check_ledger", lambda *_: None)


def forks_hold_what_they_did_not_get(patch: pytest.MonkeyPatch) -> None:
    """One that finds a parent gone goes on waiting on the others."""
    close = CacheTable._close

    def forgetful(table: CacheTable, entry: CacheEntry) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CacheTable, "_advance", lambda *_: None)
            close(table, entry)

    patch.setattr(CacheTable, "_close", forgetful)
    patch.setattr(CacheTable, "check_invariants", lambda _: None)


# Order, and what is left behind.


def order_not_kept(patch: pytest.MonkeyPatch) -> None:
    advance = CacheTable._advance

    def last_first(table: CacheTable, *entries: CacheEntry) -> None:
        for entry in entries:
            entry.waiting.reverse()
        advance(table, *entries)

    patch.setattr(CacheTable, "_advance", last_first)


def releases_overtake(patch: pytest.MonkeyPatch) -> None:
    submit = WatchedTable.submit

    def at_once(table: WatchedTable, request: Request, now_s: float, *args: Any) -> int:
        ticket = submit(table, request, now_s, *args)
        operation = table._operations.get(ticket)
        if isinstance(request, Release) and operation is not None and operation.phase is Phase.WAITING:
            operation.entry.waiting.remove(operation)
            operation.entry.waiting.appendleft(operation)
        return ticket

    patch.setattr(WatchedTable, "submit", at_once)


def effects_as(change: Callable[[list[Effect]], list[Effect]]) -> Plant:
    """A dispatcher that carries out other effects than those it was given."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        take = CacheTable.take_effects
        patch.setattr(CacheTable, "take_effects", lambda table: change(take(table)))

    return plant


def without(kind: type[AbortForward | ReleaseSequences]) -> Plant:
    return effects_as(
        lambda effects: [e for e in effects if not (isinstance(e, Send) and isinstance(e.command, kind))]
    )


nothing_aborted = without(AbortForward)
nothing_released = without(ReleaseSequences)
sent_twice = effects_as(
    lambda effects: [
        e for e in effects for _ in range(1 + (isinstance(e, Send) and e.command.op_id % 8 == 0))
    ]
)


def cancelled_are_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "cancel", lambda *_: None)


def tenants_keep_what_they_had(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "_finish_reserving", lambda *_: None)
    patch.setattr(CacheTable, "check_invariants", lambda _: None)


@pytest.mark.parametrize(
    "plant",
    [
        fencing_off,
        repetitions_not_recognised,
        other_tokens_taken_for_a_repetition,
        repetitions_not_recognised_after_a_restart,
        repetitions_applied_once_more_after_a_death,
        request_ids_of_creations_ignored,
        request_ids_of_forks_ignored,
        answered_before_it_is_durable,
        answered_without_a_journal,
        failed_writes_taken_for_durable,
        torn_rows_accepted,
        checksums_not_looked_at,
        tokens_lost_after_verify,
        a_tree_taken_for_its_first_tokens,
        trees_of_the_same_tokens_taken_for_one,
        late_answers_accepted,
        nothing_replayed,
        replayed_without_the_tail,
        wrong_tokens_replayed,
        wrong_position_sent,
        losses_not_noticed,
        adopted_unseen,
        adopted_in_full,
        nobody_is_quarantined,
        all_are_quarantined,
        the_parked_are_forgotten,
        computed_by_anybody,
        caches_of_the_weights_before_used_on,
        checked_for_any_weights,
        weights_not_written_down,
        forks_are_of_the_present_weights,
        what_is_under_way_survives_its_weights,
        forks_begin_at_their_first_turn,
        forks_of_several_are_cut,
        forks_are_not_fenced,
        places_in_a_fork_not_written_down,
        forks_hold_what_they_did_not_get,
        order_not_kept,
        releases_overtake,
        nothing_aborted,
        nothing_released,
        sent_twice,
        cancelled_are_answered,
        tenants_keep_what_they_had,
    ],
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        run_schedules(range(CONTROL_SCHEDULES))
