"""Parks operations until they have what they need to be computed: see `Need`. Pure.

Usually a cache has a worker with KV of all its tokens, and its operations are not parked. `attempts.py`
begins operations, and tries parked ones again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from service.caches.effects import Context
from service.caches.entries import Need, Operation, WorkerView
from service.caches.placement import KvPlacement, Workers
from service.caches.quarantine import must_be_alone
from service.caches.requests import Append
from service.caches.segments import Segment
from service.caches.states import PARKED, REPLAYING
from service.caches.worker_load import retry_after_s
from service.errors import DeadlinePassed, KvExhausted, NoWorker, Overloaded, QuireError

# At most this many tokens to replay are sent in each interval; a single longer cache may exceed it. Copying
# and encoding as many takes some milliseconds.
_MAX_REPLAYED_TOKENS = 1 << 15
_REPLAY_INTERVAL_S = 0.02
# A parked operation fails this long (at most a tenth of its time) before its deadline, so that the caller
# still gets the reason.
_REFUSE_EARLY_S = 0.1

_Key = TypeVar("_Key")


class ParkedOperations:
    """Owner of the parked operations.

    Attributes:
        by_ticket: The parked operations, by ticket.
        changed: Whether to check them again, since what they wait for may be there. Set directly by other
            modules: a method call for each step of a worker would cost more.
        replaying: By worker and first segment, how many attempts replay a cache that begins with it.
        suspects: By worker, how many attempts compute a suspect.
    """

    def __init__(self, context: Context, workers: Workers, kv: KvPlacement, max_wait_s: float) -> None:
        self._context = context
        self._workers = workers
        self._kv = kv
        self._max_wait_s = max_wait_s
        self.by_ticket: dict[int, Operation] = {}
        self.changed = False
        self.replaying: Counter[tuple[WorkerView, Segment]] = Counter()
        self.suspects: Counter[WorkerView] = Counter()
        # When the current interval for replays began, and the tokens that were sent in it.
        self._replays_since_s, self._replayed_tokens = -math.inf, 0

    def take_ready(self) -> Iterator[Operation]:
        """Removes and yields those that can probably run now, oldest first."""
        self.changed = False
        full: set[WorkerView] = set()
        for ticket in sorted(self.by_ticket):
            operation = self.by_ticket.get(ticket)
            if operation is not None and self._may_run(operation, full):
                del self.by_ticket[ticket]
                operation.need = operation.preempted_for = None
                yield operation

    def expired(self) -> list[tuple[Operation, QuireError]]:
        """The operations whose time is up, each with its error. They stay parked."""
        now_s = self._context.now_s
        overdue = [one for one in self.by_ticket.values() if now_s >= self._park_until_s(one)]
        return [(operation, self._expiry_error(operation)) for operation in overdue]

    def _park_until_s(self, operation: Operation) -> float:
        until_s = operation.submitted_s + self._max_wait_s
        if operation.deadline_s is None:
            return until_s
        whole_s = operation.deadline_s - operation.submitted_s
        return min(until_s, operation.deadline_s - min(_REFUSE_EARLY_S, whole_s / 10))

    def _expiry_error(self, operation: Operation) -> QuireError:
        if operation.need is Need.PAGES:
            return KvExhausted(operation.pages_needed, operation.pages_available)
        if operation.need is Need.WORKER:
            return NoWorker()
        if operation.deadline_s is not None:
            return DeadlinePassed()
        return overdue_error(operation, self._context.now_s)

    def park(self, operation: Operation, need: Need) -> None:
        operation.state, operation.need = PARKED, need
        self.by_ticket[operation.ticket] = operation

    def remove(self, operation: Operation) -> None:
        """Removes an operation that is stopped, if it is parked."""
        self.by_ticket.pop(operation.ticket, None)
        operation.need = None

    def place(self, operation: Operation) -> Need | None:
        """Makes sure that the cache has a worker. Returns what the operation has to wait for, if anything."""
        entry, base = operation.entry, operation.base
        if entry.kv_len < base and not self._may_replay():
            # Checked before the placement, which is expensive for a long cache.
            return Need.REPLAY_RATE
        worker = entry.worker
        if worker is None or worker.draining:
            worker = self._assign(operation)
            if worker is None:
                return Need.WORKER
        if entry.crash_score and must_be_alone(entry) and self.suspects[worker]:
            return Need.EXCLUSIVE_WORKER
        if entry.kv_len < base and self._is_prefix_replayed(operation):
            return Need.SHARED_PREFIX
        return None

    def began(self, operation: Operation, worker: WorkerView) -> None:
        """An attempt began that others may have to wait for: a replay, or the computation of a suspect."""
        entry = operation.entry
        if operation.state is REPLAYING:
            self._replayed_tokens += len(operation.token_ids)
            operation.first_segment = segment = entry.state.tokens.segments[0]
            self.replaying[worker, segment] += 1
        if entry.crash_score and must_be_alone(entry):
            operation.is_suspect = True
            self.suspects[worker] += 1

    def ended(self, operation: Operation, worker: WorkerView) -> None:
        """An attempt ended. Parked operations may have waited for that."""
        if operation.first_segment is not None:
            _take_one(self.replaying, (worker, operation.first_segment))
            operation.first_segment = None
        if operation.is_suspect:
            _take_one(self.suspects, worker)
            operation.is_suspect = False
        self.changed = True

    def _assign(self, operation: Operation) -> WorkerView | None:
        """Assigns the cache to a worker, if any takes new attempts."""
        entry, state, append = operation.entry, operation.entry.state, operation.request
        self._kv.drop(entry)
        if not self._workers.open_workers(state.weights):
            return None
        assert isinstance(append, Append)
        tokens = state.tokens.copy()
        if operation.copy_number is None:
            tokens.extend(append.token_ids)
        worker = self._workers.choose(tokens, state.salt, state.weights)
        self._kv.assign(entry, worker)
        return worker

    def _may_replay(self) -> bool:
        if self._context.now_s - self._replays_since_s >= _REPLAY_INTERVAL_S:
            self._replays_since_s, self._replayed_tokens = self._context.now_s, 0
        return self._replayed_tokens < _MAX_REPLAYED_TOKENS

    def _is_prefix_replayed(self, operation: Operation) -> bool:
        """Whether its worker is replaying a cache with a common prefix."""
        worker, tokens = operation.entry.worker, operation.entry.state.tokens
        return worker is not None and tokens.is_shared and self.replaying[worker, tokens.segments[0]] > 0

    def _may_run(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether a parked operation can probably run. Adds workers without free pages to `full`."""
        match operation.need:
            case Need.WORKER:
                return bool(self._workers.open_workers(operation.entry.state.weights))
            case Need.EXCLUSIVE_WORKER:
                return operation.entry.worker is None or not self.suspects[operation.entry.worker]
            case Need.SHARED_PREFIX:
                return not self._is_prefix_replayed(operation)
            case Need.REPLAY_RATE:
                return self._may_replay()
        return self._may_fit(operation, full)

    def _may_fit(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether its worker, or any worker if it has none, may have enough pages. Preempts other caches."""
        if operation.preempted_for is not None and operation.preempted_for.op_id:
            # The two would take the pages from each other for ever.
            return False
        own, append = operation.entry.worker, operation.request
        assert isinstance(append, Append)
        tokens = operation.base + len(append.token_ids)
        for worker in self._workers.preferred(operation.entry.state.weights) if own is None else (own,):
            if worker in full:
                continue
            # Without a worker, its KV was dropped, and it needs pages for all tokens.
            whole = min(worker.pages_for(tokens), worker.pages_total)
            missing = (operation.pages_needed if worker is own else whole) - worker.headroom
            if missing <= 0 or self.preempt(worker, missing, operation):
                return True
            if worker is own and len(worker.held) <= 1:
                # No other cache can free pages later: the worker decides whether it fits.
                return True
            full.add(worker)
        return False

    def preempt(self, worker: WorkerView, pages: int, operation: Operation) -> bool:
        """Drops KV of other caches. Those that wait for pages then wait for this operation's attempt, too."""
        evicted = self._kv.preempt(worker, pages, operation)
        for entry in evicted:
            if entry.running is not None and entry.running.need is Need.PAGES:
                entry.running.preempted_for = operation
        return bool(evicted)


def _take_one(counts: Counter[_Key], key: _Key) -> None:
    """Subtracts one, and deletes the entry at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def overdue_error(operation: Operation, now_s: float) -> QuireError:
    """The error of an operation that waited for too long."""
    if operation.deadline_s is not None and now_s >= operation.deadline_s:
        return DeadlinePassed()
    waited_s = now_s - operation.submitted_s
    return Overloaded(waited_s, waited_s, retry_after_s(waited_s))
