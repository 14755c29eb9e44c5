"""How operations are computed: placement, replay, forward, retries. Pure.

An operation goes through attempts until one succeeds, its deadline passes, or a retry cannot help. Each
attempt is one forward with its own op id, so an answer to an earlier attempt is recognised and ignored. If
the worker dies, has lost the KV or has too few pages, the operation starts again. The operation describes the
forward, and is the command to the worker: one that ends before it was sent is taken back. The operations
whose attempts are over are returned, with what came of them in `done` or `error`; there are no callbacks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from service.caches.answers import CommandFailed, Event, ForwardDone
from service.caches.effects import AbortForward, Context, ForkSequence, ReleaseSequences, TruncateSequence
from service.caches.entries import Need, Operation, WorkerView
from service.caches.placement import KvPlacement, Workers
from service.caches.quarantine import blame, clear, must_be_alone
from service.caches.segments import Segment
from service.caches.states import COMPUTING, PARKED, REPLAYING
from service.caches.worker_load import End, retry_after_s
from service.errors import (
    DeadlinePassed,
    InternalError,
    KvExhausted,
    NoWorker,
    Overloaded,
    QuireError,
    SequenceQuarantined,
    SequenceTooLong,
    WorkerFault,
)

# Retries of an operation after workers died or had lost its KV. Then it fails.
_MOST_FAILURES = 8
# The most tokens to replay that are sent within `_MOMENT_S`; a single longer cache may exceed it. To copy and
# encode as many takes some milliseconds.
_REPLAYED_AT_ONCE = 1 << 15
_MOMENT_S = 0.02
# A parked operation fails this long, or a tenth of its time, before its deadline: so the reason arrives.
_REFUSE_EARLY_S = 0.1

_Key = TypeVar("_Key")


class Attempts:
    """Owns the running attempts and the parked operations."""

    def __init__(self, context: Context, workers: Workers, kv: KvPlacement, max_wait_s: float) -> None:
        self._context = context
        self._workers = workers
        self._kv = kv
        self._max_wait_s = max_wait_s
        # The operations whose attempt a worker computes, by op id; the parked ones, by ticket.
        self.running: dict[int, Operation] = {}
        self.parked: dict[int, Operation] = {}
        # How many attempts replay each first segment, by worker; how many compute a suspect, by worker.
        self._replayed: Counter[tuple[WorkerView, Segment]] = Counter()
        self._suspects: Counter[WorkerView] = Counter()
        # The begin of the current moment, and the tokens to replay that were sent in it.
        self._replays_since_s = -math.inf
        self._replayed_tokens = 0
        # Whether parked operations have to be checked.
        self.changed = False

    def under_way(self, worker: WorkerView) -> Iterator[Operation]:
        return (o for o in self.running.values() if o.entry.worker is worker)

    # Begin and stop.

    def begin(self, operation: Operation, base: int, prompt_len: int, copy_number: int | None = None) -> None:
        """Computes the append of an operation after the first `base` tokens of its cache.

        With `copy_number` on a temporary copy. Raises QuireError if it cannot be computed at all.
        """
        operation.base, operation.prompt_len, operation.copy_number = base, prompt_len, copy_number
        entry, append = operation.entry, operation.append
        assert append is not None
        if entry.quarantined:
            raise SequenceQuarantined
        worker = entry.worker
        if worker is None or worker.draining or entry.kv_len < base or entry.crash_score:
            need = self._place(operation)
            if need is not None:
                self._park(operation, need)
                return
            worker = entry.worker
            assert worker is not None
        wanted = base + len(append.token_ids)
        if wanted > worker.capacity_tokens:
            raise SequenceTooLong(wanted, worker.capacity_tokens)
        kv_len = entry.kv_len
        if kv_len < base:
            # First what the worker does not have.
            self._replayed_tokens += base - kv_len
            missing = entry.state.tokens.between(kv_len, base)
            self._forward(operation, worker, missing, kv_len, rows=0, replays=True)
        else:
            self._forward(operation, worker, append.token_ids, base, append.rows)

    def stop(self, operation: Operation) -> None:
        """Stops the attempt or the parking of an operation. It gets no result."""
        entry, op_id, worker = operation.entry, operation.op_id, operation.entry.worker
        self.parked.pop(operation.ticket, None)
        operation.need = None
        if not op_id:
            return
        assert worker is not None
        was_sent = self._end_attempt(operation, worker, self._end_of(operation))
        if was_sent:
            self._context.send(worker, AbortForward(self._context.number(), op_id))
        if operation.state is COMPUTING and operation.copy_number is not None:
            self._release_copy(operation, worker)
        elif was_sent and entry.visible:
            # The worker may have computed it already: then its copy is too long.
            known = entry.kv_len if operation.state is REPLAYING else operation.base
            self._context.send(worker, TruncateSequence(self._context.number(), entry.number, known))

    # Workers.

    def workers_changed(self) -> None:
        """There is a new worker, or a worker has more free pages."""
        self.changed = True

    def answered(self, events: Iterable[Event]) -> list[Operation]:
        """Workers answered. Returns the operations whose attempts are over.

        Answers to attempts that ended earlier are ignored.
        """
        # As `_end_attempt`, but for all of them together: this runs for each token.
        over: list[Operation] = []
        others: list[tuple[Operation, ForwardDone | CommandFailed]] = []
        answered: dict[WorkerView, list[Operation]] = {}
        # Those of the worker before, which is nearly always the same.
        its: list[Operation] = []
        before: WorkerView | None = None
        for op_id, answer in events:
            operation = self.running.get(op_id)
            if operation is None or answer is None:
                continue
            entry, worker = operation.entry, operation.entry.worker
            assert worker is not None
            if operation.state is REPLAYING or entry.crash_score or isinstance(answer, CommandFailed):
                failed = isinstance(answer, CommandFailed)
                self._end_attempt(operation, worker, self._end_of(operation) if failed else End.ANSWERED)
                others.append((operation, answer))
                continue
            del self.running[op_id]
            operation.op_id, operation.done = 0, answer
            worker.pages_queued -= operation.pages
            if worker is not before:
                before, its = worker, answered.setdefault(worker, [])
            its.append(operation)
            over.append(operation)
        for worker, its in answered.items():
            worker.load.leave(its, self._context.now_s, End.ANSWERED)
            # A parked operation may have waited for one of these.
            self.changed = True
        # The load of a worker is without all of these when another attempt begins.
        for operation, answer in others:
            if self._is_over(operation, answer):
                over.append(operation)
        return over

    def _is_over(self, operation: Operation, answer: ForwardDone | CommandFailed) -> bool:
        """Goes on after an attempt that has failed, was a replay, or that of a suspect."""
        entry = operation.entry
        if isinstance(answer, CommandFailed):
            return self._attempt_failed(operation, answer)
        if operation.state is REPLAYING:
            assert entry.worker is not None
            entry.worker.load.replayed(len(operation.token_ids), answer.reused_tokens)
            entry.has_kv(operation.base)
            computed = len(operation.token_ids) - answer.reused_tokens
            operation.replayed_tokens += computed
            self._context.counts["replayed_tokens"] += computed
            return self.begin_again(operation)
        clear(entry)
        operation.done = answer
        return True

    def worker_lost(self, worker: WorkerView, *, crashed: bool | None) -> list[Operation]:
        """Ends all attempts on a lost worker. Returns their operations, for `try_again`.

        crashed: None: it lives on, so that none of them is suspicious.
        """
        under_way = list(self.under_way(worker))
        if crashed is not None:
            blame([operation.entry for operation in under_way], crashed=crashed)
        for operation in under_way:
            self._end_attempt(operation, worker, End.TAKEN_BACK)
        self.changed = True
        return under_way

    def interrupt(self, worker: WorkerView) -> list[Operation]:
        """Ends all attempts on a worker that has dropped them, and has the KV of all caches.

        Returns their operations, for `begin_again`.
        """
        under_way = list(self.under_way(worker))
        for operation in under_way:
            self.stop(operation)
            if not operation.entry.visible:
                # Nobody knows how much of it was computed.
                self._kv.drop(operation.entry)
        return under_way

    def try_again(self, operation: Operation, final_error: QuireError) -> bool:
        """Retries after a failed attempt; after too many of these it ends with `final_error`."""
        operation.failures += 1
        if operation.failures > _MOST_FAILURES:
            return self.failed(operation, final_error)
        return self.begin_again(operation)

    def failed(self, operation: Operation, error: QuireError) -> bool:
        """There is no further attempt. Returns True, as those that say whether the attempts are over."""
        operation.error = error
        return True

    # Parked operations.

    def retry_parked(self) -> Iterator[Operation]:
        """Retries parked operations that may be able to run, the oldest first. Call it while `changed`.

        Yields those whose attempts are over.
        """
        self.changed = False
        full: set[WorkerView] = set()
        for ticket in sorted(self.parked):
            operation = self.parked.get(ticket)
            if operation is not None and self._may_run(operation, full):
                del self.parked[ticket]
                operation.need = operation.preempted_for = None
                if self.begin_again(operation):
                    yield operation

    def tick(self) -> Iterator[Operation]:
        """Fails parked operations whose time is up. The next `retry_parked` checks the others."""
        for operation in [o for o in self.parked.values() if self._context.now_s >= self._park_until_s(o)]:
            self.failed(operation, self._parked_too_long(operation))
            yield operation
        self.changed = True

    def _park_until_s(self, operation: Operation) -> float:
        until_s = operation.submitted_s + self._max_wait_s
        if operation.deadline_s is None:
            return until_s
        whole_s = operation.deadline_s - operation.submitted_s
        return min(until_s, operation.deadline_s - min(_REFUSE_EARLY_S, whole_s / 10))

    def _parked_too_long(self, operation: Operation) -> QuireError:
        if operation.need is Need.PAGES:
            return KvExhausted(operation.pages_needed, operation.pages_available)
        if operation.need is Need.WORKER:
            return NoWorker()
        return self._too_late(operation) if operation.deadline_s is None else DeadlinePassed()

    # What an attempt needs.

    def _park(self, operation: Operation, need: Need) -> None:
        operation.state, operation.need = PARKED, need
        self.parked[operation.ticket] = operation

    def _place(self, operation: Operation) -> Need | None:
        """Makes sure that a worker has the cache. Returns what the operation has to wait for, if anything."""
        entry, base = operation.entry, operation.base
        if entry.kv_len < base and not self._may_replay():
            # Before the placement, which is expensive for a long cache.
            return Need.REPLAY_RATE
        worker = entry.worker
        if worker is None or worker.draining:
            worker = self._assign(operation)
            if worker is None:
                return Need.WORKER
        if entry.crash_score and must_be_alone(entry) and self._suspects[worker]:
            return Need.EXCLUSIVE_WORKER
        if entry.kv_len < base and self._is_prefix_replayed(operation):
            return Need.SHARED_PREFIX
        return None

    def _assign(self, operation: Operation) -> WorkerView | None:
        """Assigns the cache to a worker that takes new attempts, if there is one."""
        entry, state, append = operation.entry, operation.entry.state, operation.append
        self._kv.drop(entry)
        if not self._workers.open_workers(state.weights):
            return None
        assert append is not None
        tokens = state.tokens.copy()
        if operation.copy_number is None:
            tokens.extend(append.token_ids)
        worker = self._workers.choose(tokens, state.salt, state.weights)
        self._kv.assign(entry, worker)
        return worker

    def _may_replay(self) -> bool:
        if self._context.now_s - self._replays_since_s >= _MOMENT_S:
            self._replays_since_s, self._replayed_tokens = self._context.now_s, 0
        return self._replayed_tokens < _REPLAYED_AT_ONCE

    def _is_prefix_replayed(self, operation: Operation) -> bool:
        """Whether its worker is replaying a cache with a common prefix."""
        worker, tokens = operation.entry.worker, operation.entry.state.tokens
        return worker is not None and tokens.is_shared and self._replayed[worker, tokens.segments[0]] > 0

    def _may_run(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether a parked operation may be able to run. Adds workers without free pages to `full`."""
        match operation.need:
            case Need.WORKER:
                return bool(self._workers.open_workers(operation.entry.state.weights))
            case Need.EXCLUSIVE_WORKER:
                return operation.entry.worker is None or not self._suspects[operation.entry.worker]
            case Need.SHARED_PREFIX:
                return not self._is_prefix_replayed(operation)
            case Need.REPLAY_RATE:
                return self._may_replay()
        return self._may_fit(operation, full)

    def _may_fit(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether its worker may have enough pages by now, or any if it has none. Preempts others."""
        if operation.preempted_for is not None and operation.preempted_for.op_id:
            # It would take the pages from the older one again, and lose them again, for ever.
            return False
        own, append = operation.entry.worker, operation.append
        assert append is not None
        tokens = operation.base + len(append.token_ids)
        for worker in self._workers.preferred(operation.entry.state.weights) if own is None else (own,):
            if worker in full:
                continue
            # Without a worker its KV was dropped: it needs pages for all tokens.
            whole = min(worker.pages_for(tokens), worker.pages_total)
            missing = (operation.pages_needed if worker is own else whole) - worker.headroom
            if missing <= 0 or self._preempt(worker, missing, operation):
                return True
            if worker is own and not self._can_others_free_pages(worker):
                # The worker decides whether it fits.
                return True
            full.add(worker)
        return False

    def _preempt(self, worker: WorkerView, pages: int, operation: Operation) -> bool:
        """Drops KV of others. Those that wait for pages wait for the attempt of this one, too."""
        evicted = self._kv.preempt(worker, pages, operation)
        for entry in evicted:
            if entry.running is not None and entry.running.need is Need.PAGES:
                entry.running.preempted_for = operation
        return bool(evicted)

    def _can_others_free_pages(self, worker: WorkerView) -> bool:
        """Whether other caches than the one in need have pages on its worker, which they may free later."""
        return len(worker.held) > 1 or any(self.under_way(worker))

    # Attempts.

    def _forward(
        self,
        operation: Operation,
        worker: WorkerView,
        token_ids: Sequence[int],
        position: int,
        rows: int,
        *,
        replays: bool = False,
    ) -> None:
        """Sends a forward. Raises Overloaded or DeadlinePassed if it would not be done in time."""
        entry, append, context = operation.entry, operation.append, self._context
        assert append is not None
        tokens, now_s = len(token_ids), context.now_s
        wait_s = operation.submitted_s + self._max_wait_s - now_s
        timeout_s = worker.load.enter(
            operation, tokens, rows, append.priority, wait_s, now_s, is_replay=replays
        )
        copy_number = operation.copy_number
        if copy_number is not None and not replays and position:
            context.send(worker, ForkSequence(context.number(), entry.number, (copy_number,)))
        if not entry.was_sent:
            self._kv.sent(entry)
            self._workers.affinity.record(token_ids, worker, entry.state.salt)
        operation.state, operation.op_id = REPLAYING if replays else COMPUTING, context.number()
        operation.token_ids, operation.position, operation.timeout_s = token_ids, position, timeout_s
        operation.pages = pages = -(-tokens // worker.page_tokens)
        worker.pages_queued += pages
        self.running[operation.op_id] = operation
        if replays:
            operation.first_segment = segment = entry.state.tokens.segments[0]
            self._replayed[worker, segment] += 1
        if entry.crash_score and must_be_alone(entry):
            operation.is_suspect = True
            self._suspects[worker] += 1
        context.effects.commands.append((worker.worker_id, worker.epoch, operation))

    def _end_attempt(self, operation: Operation, worker: WorkerView, end: End) -> bool:
        """Removes the running attempt from all counts. Returns whether it was sent: if not, it never is."""
        was_sent = not self._context.withdraw(operation.op_id)
        del self.running[operation.op_id]
        operation.op_id = 0
        worker.load.leave((operation,), self._context.now_s, end)
        worker.pages_queued -= operation.pages
        if operation.first_segment is not None:
            _take_one(self._replayed, (worker, operation.first_segment))
            operation.first_segment = None
        if operation.is_suspect:
            _take_one(self._suspects, worker)
            operation.is_suspect = False
        # A parked operation may have waited for this.
        self.changed = True
        return was_sent

    def _end_of(self, operation: Operation) -> End:
        return End.LATE if operation.is_late(self._context.now_s) else End.TAKEN_BACK

    def _attempt_failed(self, operation: Operation, failed: CommandFailed) -> bool:
        entry, worker, error = operation.entry, operation.entry.worker, failed.error
        assert worker is not None
        if operation.copy_number is not None and operation.state is COMPUTING:
            # A failed forward does not release its copy.
            self._release_copy(operation, worker)
        if failed.kv_missing:
            entry.has_kv(0)
            return self.try_again(operation, WorkerFault())
        if isinstance(error, KvExhausted):
            return self._pages_missing(operation, worker, error)
        return self.failed(
            operation, self._too_late(operation) if isinstance(error, DeadlinePassed) else error
        )

    def _release_copy(self, operation: Operation, worker: WorkerView) -> None:
        assert operation.copy_number is not None
        self._context.send(worker, ReleaseSequences(self._context.number(), (operation.copy_number,)))

    def _pages_missing(self, operation: Operation, worker: WorkerView, error: KvExhausted) -> bool:
        """Its worker has too few pages: preempts others, takes another worker, or parks the operation."""
        entry = operation.entry
        operation.pages_needed, operation.pages_available = error.pages_needed, error.pages_available
        worker.pages_available = error.pages_available
        missing = max(1, error.pages_needed - error.pages_available)
        if self._preempt(worker, missing, operation):
            return self.begin_again(operation)
        whole = worker.pages_for(entry.length) + error.pages_needed
        others = [w for w in self._workers.preferred(worker.weights) if w is not worker]
        if any(w.headroom >= whole for w in others) and operation.failures < _MOST_FAILURES:
            operation.failures += 1
            self._kv.drop(entry)
            return self.begin_again(operation)
        if self._can_others_free_pages(worker):
            self._park(operation, Need.PAGES)
            return False
        # Pages were freed meanwhile, or it needs more than the worker has.
        return self.try_again(operation, error)

    def _too_late(self, operation: Operation) -> QuireError:
        """The error of an operation that waited for too long."""
        now_s = self._context.now_s
        if operation.deadline_s is not None and now_s >= operation.deadline_s:
            return DeadlinePassed()
        waited_s = now_s - operation.submitted_s
        return Overloaded(waited_s, waited_s, retry_after_s(waited_s))

    def begin_again(self, operation: Operation) -> bool:
        """Begins with the same arguments as before. Returns whether the attempts are over."""
        try:
            self.begin(operation, operation.base, operation.prompt_len, operation.copy_number)
        except Exception as error:
            # Also a bug must not block the cache for ever.
            return self.failed(operation, failure_of(error))
        return False


def _take_one(counts: Counter[_Key], key: _Key) -> None:
    """Subtracts one, and deletes the entry at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def failure_of(error: Exception) -> QuireError:
    """The error for the caller. That of a bug is made here: a frame of the traceback must not refer to it."""
    if isinstance(error, QuireError):
        return error
    internal = InternalError()
    internal.__cause__ = error
    return internal
