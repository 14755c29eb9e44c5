"""How operations are computed: placement, replay, forward, further attempts. Pure.

An operation goes through attempts until one succeeds, its deadline passes, or another one cannot help. Each
attempt is one forward with its own op id, so that late answers to earlier attempts are recognised and
ignored. If the worker dies, has lost the KV or has too few pages, the operation starts again.

The operation is itself the command to the worker. If an attempt ends before its command was sent, the command
is withdrawn. Methods return the operations whose attempts are over, with the outcome in `done` or `error`;
there are no callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from service.caches.answers import CommandFailed, Event, ForwardDone
from service.caches.effects import AbortForward, Context, ForkSequence, ReleaseSequences, TruncateSequence
from service.caches.entries import Need, Operation, WorkerView
from service.caches.parked import ParkedOperations, overdue_error
from service.caches.placement import KvPlacement, Workers
from service.caches.quarantine import blame, clear
from service.caches.requests import Append
from service.caches.states import COMPUTING, REPLAYING
from service.caches.worker_load import End
from service.errors import (
    DeadlinePassed,
    InternalError,
    KvExhausted,
    QuireError,
    SequenceQuarantined,
    SequenceTooLong,
    WorkerFault,
)

# Failed attempts of an operation, because workers died, had lost its KV or lacked pages. Then it fails.
_MOST_FAILURES = 8


class Attempts:
    """Owns the running attempts."""

    def __init__(
        self, context: Context, workers: Workers, kv: KvPlacement, parked: ParkedOperations, max_wait_s: float
    ) -> None:
        self._context = context
        self._workers = workers
        self._kv = kv
        self._max_wait_s = max_wait_s
        # The operations that a worker computes now, by the op id of the attempt.
        self.running: dict[int, Operation] = {}
        self._parked = parked

    def under_way(self, worker: WorkerView) -> Iterator[Operation]:
        return (o for o in self.running.values() if o.entry.worker is worker)

    # Begin and stop.

    def begin(self, operation: Operation, base: int, prompt_len: int, copy_number: int | None = None) -> None:
        """Starts to compute the append of an operation after the first `base` tokens of its cache.

        On a temporary copy if `copy_number` is given. Raises QuireError if it cannot be computed at all.
        """
        operation.base, operation.prompt_len, operation.copy_number = base, prompt_len, copy_number
        entry, append = operation.entry, operation.request
        assert isinstance(append, Append)
        if entry.quarantined:
            raise SequenceQuarantined
        worker = entry.worker
        if worker is None or worker.draining or entry.kv_len < base or entry.crash_score:
            need = self._parked.place(operation)
            if need is not None:
                self._parked.park(operation, need)
                return
            worker = entry.worker
            assert worker is not None
        wanted = base + len(append.token_ids)
        if wanted > worker.capacity_tokens:
            raise SequenceTooLong(wanted, worker.capacity_tokens)
        kv_len = entry.kv_len
        if kv_len < base:
            # First the tokens that the worker does not have.
            missing = entry.state.tokens.between(kv_len, base)
            self._forward(operation, worker, missing, kv_len, rows=0, replays=True)
        else:
            self._forward(operation, worker, append.token_ids, base, append.rows)

    def stop(self, operation: Operation) -> None:
        """Stops the attempt or the parking of an operation. It gets no result."""
        entry, op_id, worker = operation.entry, operation.op_id, operation.entry.worker
        self._parked.remove(operation)
        if not op_id:
            return
        assert worker is not None
        was_sent = self._end_attempt(operation, worker, self._end_of(operation))
        if was_sent:
            self._context.send(worker, AbortForward(self._context.number(), op_id))
        if operation.state is COMPUTING and operation.copy_number is not None:
            self._release_copy(operation, worker)
        elif was_sent and entry.visible:
            # The worker may have computed it already: then its sequence is too long.
            known = entry.kv_len if operation.state is REPLAYING else operation.base
            self._context.send(worker, TruncateSequence(self._context.number(), entry.number, known))

    # Workers.

    def answered(self, events: Iterable[Event]) -> list[Operation]:
        """A worker answered. Returns the operations whose attempts are over.

        Answers to attempts that ended earlier are ignored.
        """
        # `_end_attempt`, inlined for all answers together: this runs for each token.
        over: list[Operation] = []
        worker: WorkerView | None = None
        others: list[tuple[Operation, ForwardDone | CommandFailed]] = []
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
            over.append(operation)
        if over:
            assert worker is not None
            worker.load.leave(over, self._context.now_s, End.ANSWERED)
            # A parked operation may have waited for one of these.
            self._parked.changed = True
        # Only now, when all of these have left the worker's load, may other attempts begin.
        for operation, answer in others:
            if self._is_over(operation, answer):
                over.append(operation)
        return over

    def _is_over(self, operation: Operation, answer: ForwardDone | CommandFailed) -> bool:
        """Whether the attempts are over after this one, which failed, was a replay, or computed a suspect.

        If not, the next attempt has begun.
        """
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

        crashed: None: the worker lives on, so no cache is a suspect.
        """
        under_way = list(self.under_way(worker))
        if crashed is not None:
            blame([operation.entry for operation in under_way], crashed=crashed)
        for operation in under_way:
            self._end_attempt(operation, worker, End.ABORTED)
        self._parked.changed = True
        return under_way

    def interrupt(self, worker: WorkerView) -> list[Operation]:
        """Ends all attempts on a worker that has aborted them, and keeps the KV of all caches.

        Returns their operations, for `begin_again`.
        """
        under_way = list(self.under_way(worker))
        for operation in under_way:
            self.stop(operation)
            if not operation.entry.visible:
                # It is not known how much of it was computed.
                self._kv.drop(operation.entry)
        return under_way

    def try_again(self, operation: Operation, final_error: QuireError) -> bool:
        """Begins again after a failed attempt, or ends after too many of them. Returns whether it ended."""
        operation.failures += 1
        if operation.failures > _MOST_FAILURES:
            return self.failed(operation, final_error)
        return self.begin_again(operation)

    def failed(self, operation: Operation, error: QuireError) -> bool:
        """Ends the attempts with an error. Returns True: they are over."""
        operation.error = error
        return True

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
        """Sends a forward. Raises Overloaded or DeadlinePassed if it cannot be done in time."""
        entry, append, context = operation.entry, operation.request, self._context
        assert isinstance(append, Append)
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
        if replays or entry.crash_score:
            self._parked.began(operation, worker)
        context.effects.commands.append((worker.worker_id, worker.epoch, operation))

    def _end_attempt(self, operation: Operation, worker: WorkerView, end: End) -> bool:
        """Takes the running attempt out of all counts. Returns whether it was sent; else it is withdrawn."""
        was_sent = not self._context.withdraw(operation.op_id)
        del self.running[operation.op_id]
        operation.op_id = 0
        worker.load.leave((operation,), self._context.now_s, end)
        worker.pages_queued -= operation.pages
        self._parked.ended(operation, worker)
        return was_sent

    def _end_of(self, operation: Operation) -> End:
        return End.LATE if operation.is_late(self._context.now_s) else End.ABORTED

    def _attempt_failed(self, operation: Operation, failed: CommandFailed) -> bool:
        entry, worker, error = operation.entry, operation.entry.worker, failed.error
        assert worker is not None
        if operation.copy_number is not None and operation.state is COMPUTING:
            # The worker keeps the copy when the forward on it fails.
            self._release_copy(operation, worker)
        if failed.kv_missing:
            entry.has_kv(0)
            return self.try_again(operation, WorkerFault())
        if isinstance(error, KvExhausted):
            return self._pages_missing(operation, worker, error)
        if isinstance(error, DeadlinePassed):
            error = overdue_error(operation, self._context.now_s)
        return self.failed(operation, error)

    def _release_copy(self, operation: Operation, worker: WorkerView) -> None:
        assert operation.copy_number is not None
        self._context.send(worker, ReleaseSequences(self._context.number(), (operation.copy_number,)))

    def _pages_missing(self, operation: Operation, worker: WorkerView, error: KvExhausted) -> bool:
        """The worker lacks pages: preempts other caches, takes another worker, or parks the operation."""
        entry = operation.entry
        operation.pages_needed, operation.pages_available = error.pages_needed, error.pages_available
        worker.pages_available = error.pages_available
        missing = max(1, error.pages_needed - error.pages_available)
        if self._parked.preempt(worker, missing, operation):
            return self.begin_again(operation)
        whole = worker.pages_for(entry.length) + error.pages_needed
        others = [w for w in self._workers.preferred(worker.weights) if w is not worker]
        if any(w.headroom >= whole for w in others) and operation.failures < _MOST_FAILURES:
            operation.failures += 1
            self._kv.drop(entry)
            return self.begin_again(operation)
        if len(worker.held) > 1:
            # Other caches may free pages later.
            self._parked.park(operation, Need.PAGES)
            return False
        # Pages were freed meanwhile, or it needs more pages than the worker has at all.
        return self.try_again(operation, error)

    def begin_again(self, operation: Operation) -> bool:
        """Begins with the same arguments as before. Returns whether the attempts are over."""
        try:
            self.begin(operation, operation.base, operation.prompt_len, operation.copy_number)
        except Exception as error:
            # Not even a bug may block the cache for ever.
            return self.failed(operation, failure_of(error))
        return False


def failure_of(error: Exception) -> QuireError:
    """The error for the caller. A bug becomes an InternalError.

    It is made in a function of its own, so that no frame in the bug's traceback refers to it.
    """
    if isinstance(error, QuireError):
        return error
    internal = InternalError()
    internal.__cause__ = error
    return internal
