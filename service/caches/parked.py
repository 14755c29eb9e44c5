"""What operations need before a worker can compute them, and those that are parked until they have it. Pure.

Usually a cache has a worker, with KV of all its tokens, and nothing is to be asked. `attempts.py` begins an
operation, and tries parked ones again.
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
from service.caches.segments import Segment
from service.caches.states import PARKED, REPLAYING
from service.caches.worker_load import retry_after_s
from service.errors import DeadlinePassed, KvExhausted, NoWorker, Overloaded, QuireError

# The most tokens to replay that are sent within `_MOMENT_S`; a single longer cache may exceed it. To copy and
# encode as many takes some milliseconds.
_REPLAYED_AT_ONCE = 1 << 15
_MOMENT_S = 0.02
# A parked operation fails so long before its deadline, or a tenth of its time: the caller gets the reason.
_REFUSE_EARLY_S = 0.1

_Key = TypeVar("_Key")


class ParkedOperations:
    """Owner of the parked operations.

    Attributes:
        by_ticket: The parked operations, by ticket.
        changed: Whether they have to be checked, since what they wait for may be there. Set by whoever
            learns that: a method call for each step of a worker would cost more.
        replaying: How many attempts replay each first segment, by worker.
        suspects: How many attempts compute a suspect, by worker.
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
        # The begin of the current moment, and the tokens to replay that were sent since then.
        self._replays_since_s, self._replayed_tokens = -math.inf, 0

    def take_ready(self) -> Iterator[Operation]:
        """Takes out those that may be able to run, the oldest first."""
        self.changed = False
        full: set[WorkerView] = set()
        for ticket in sorted(self.by_ticket):
            operation = self.by_ticket.get(ticket)
            if operation is not None and self._may_run(operation, full):
                del self.by_ticket[ticket]
                operation.need = operation.preempted_for = None
                yield operation

    def expired(self) -> list[tuple[Operation, QuireError]]:
        """Those whose time is up, which stay parked, and the error of each."""
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
        """It is stopped, if it is parked."""
        self.by_ticket.pop(operation.ticket, None)
        operation.need = None

    def place(self, operation: Operation) -> Need | None:
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
        if entry.crash_score and must_be_alone(entry) and self.suspects[worker]:
            return Need.EXCLUSIVE_WORKER
        if entry.kv_len < base and self._is_prefix_replayed(operation):
            return Need.SHARED_PREFIX
        return None

    def began(self, operation: Operation, worker: WorkerView) -> None:
        """An attempt began that others may have to wait for: a replay, or that of a suspect."""
        entry = operation.entry
        if operation.state is REPLAYING:
            self._replayed_tokens += len(operation.token_ids)
            operation.first_segment = segment = entry.state.tokens.segments[0]
            self.replaying[worker, segment] += 1
        if entry.crash_score and must_be_alone(entry):
            operation.is_suspect = True
            self.suspects[worker] += 1

    def ended(self, operation: Operation, worker: WorkerView) -> None:
        """An attempt ended, for which parked operations may have waited."""
        if operation.first_segment is not None:
            _take_one(self.replaying, (worker, operation.first_segment))
            operation.first_segment = None
        if operation.is_suspect:
            _take_one(self.suspects, worker)
            operation.is_suspect = False
        self.changed = True

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
        return worker is not None and tokens.is_shared and self.replaying[worker, tokens.segments[0]] > 0

    def _may_run(self, operation: Operation, full: set[WorkerView]) -> bool:
        """Whether a parked operation may be able to run. Adds workers without free pages to `full`."""
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
            if missing <= 0 or self.preempt(worker, missing, operation):
                return True
            if worker is own and len(worker.held) <= 1:
                # No other cache can free pages later: the worker decides whether it fits.
                return True
            full.add(worker)
        return False

    def preempt(self, worker: WorkerView, pages: int, operation: Operation) -> bool:
        """Drops KV of others. Those that wait for pages wait for the attempt of this one, too."""
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
