"""The state machine of all caches: fencing, idempotence, order, leases. READ FIRST in the gateway.

No I/O and no clock. Inputs are method calls: requests, answers of workers and of the journal, lost workers,
the time. Outputs are taken with `take_effects()`: commands for workers, records for the journal, replies.
So a seeded simulator (`tests/sim`) can drive it, and check its invariants at any moment.

The state of a cache follows from its records (`ledger.py`): its tokens, and nothing about workers. One
operation of a cache runs at a time; the others wait in order (`queues.py`, the part that all requests go
through). A fork of several caches waits for its turn on each. `states.py` has the states of an operation:
usually WAITING, COMPUTING, COMMITTING, ENDED.

`append.py` handles appends, `changes.py` all other requests. The KV of a cache (`placement.py`) is a copy:
if it is lost, it is replayed when it is next needed.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from service.caches.admission import Limits
from service.caches.answers import Event
from service.caches.append import Appends, continue_caches
from service.caches.changes import Forks, Releases, Renewals, Truncations
from service.caches.effects import Claim, Effects, ReleaseSequences
from service.caches.entries import CacheEntry, Operation, RequestHandler, WorkerView
from service.caches.handlers import Parts
from service.caches.ledger import Ledger
from service.caches.queues import OperationQueues, touch
from service.caches.records import Record, numbers_of
from service.caches.requests import Append, Fork, PreviousCaches, Release, Renew, Request, Truncate
from service.caches.states import COMMITTING, WAITING
from service.caches.tenants import Tenant, adapter_digest
from service.errors import GatewayUnavailable, QuireError, WeightsChanged, WorkerLost
from service.lease import Lease


class CacheMachine(OperationQueues):
    """Owns all caches and operations. Single-threaded. Times are seconds on one monotonic clock."""

    def __init__(
        self,
        limits: Limits,
        *,
        new_cache_id: Callable[[], str] = lambda: "kv_" + secrets.token_urlsafe(18),
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
        ledger: Ledger | None = None,
    ) -> None:
        parts = Parts(limits, Ledger() if ledger is None else ledger, new_cache_id, new_seed)
        handlers: dict[type[Request], RequestHandler[Any]] = {
            Append: Appends(parts),
            Fork: Forks(parts),
            Truncate: Truncations(parts),
            Release: Releases(parts),
            Renew: Renewals(parts),
        }
        super().__init__(parts, handlers)
        self._parked = parts.parked
        # Read-only to others.
        self.weights = parts.weights
        # During recovery: when the last record of each cache was written.
        self._written_s: dict[int, float] = {}

    # Recovery.

    def recovering(self, record: Record, wall_s: float) -> None:
        """Applies a record of the journal, written at `wall_s`. Raises RecordConflict."""
        self.ledger.apply(record)
        for number in numbers_of(record):
            self._written_s[number] = wall_s

    def recovered(self, *, now_s: float, wall_s: float, tenant_of: Callable[[str], Tenant]) -> None:
        """Ends the recovery. Time during which the gateway was down counts for the leases."""
        self._context.now_s = now_s
        self._context.skip_numbers(max((state.number for state in self.ledger), default=0))
        for state in sorted(self.ledger, key=lambda state: state.number):
            tenant = tenant_of(state.tenant) if state.tenant else self.index.anonymous
            entry = self.admission.new_cache(state, tenant)
            # If the clock was set back, leases must not become longer.
            touch((entry,), now_s - max(0.0, wall_s - self._written_s[state.number]))
            self.index.add(entry)
            self.admission.count(entry)
            self._workers.were_ready = True
        self._written_s.clear()

    def claims(self, holdings: Mapping[int, int]) -> list[Claim]:
        """Returns which sequences a worker should keep. `holdings`: the length of each it has, by number."""
        claims = []
        for number, held_len in holdings.items():
            state = self.ledger.get(number)
            length = 0 if state is None else min(held_len, state.length)
            if state is not None and length:
                claims.append(Claim(number, length, state.tokens.digest(length, state.salt)))
        return claims

    # Workers.

    def worker_ready(self, worker: WorkerView, now_s: float, kept: Mapping[int, int] | None = None) -> None:
        """A worker is ready. `kept`: how many tokens of each sequence it already has, by number.

        Report its previous incarnation as lost before.
        """
        self._context.now_s = now_s
        self._workers.add(worker)
        unwanted = []
        for number, kept_len in (kept or {}).items():
            entry = self.index.by_number(number)
            if entry is None or not self._kv.adopt(entry, worker, kept_len):
                unwanted.append(number)
        if unwanted:
            self._context.send(worker, ReleaseSequences(self._context.number(), unwanted))
        self._parked.changed = True

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        """A worker is silent (a suspect), or answers again.

        A suspect keeps its caches. It gets no new ones, unless all workers are suspects.
        """
        worker = self._workers.find(worker_id, epoch)
        if worker is not None:
            worker.suspect = suspect

    def worker_draining(self, worker_id: str, epoch: int, now_s: float) -> None:
        """A worker will be replaced: it finishes its attempts and gets no new ones."""
        self._context.now_s = now_s
        worker = self._workers.find(worker_id, epoch)
        if worker is not None:
            worker.draining = True
            self._kv.drop(*[entry for entry in worker.held if not entry.busy])
            # Parked operations with a cache on it can go elsewhere, or wait for another worker.
            self._parked.changed = True

    def is_drained(self, worker_id: str, epoch: int) -> bool:
        worker = self._workers.find(worker_id, epoch)
        return worker is None or not any(self._attempts.under_way(worker))

    def answered(
        self,
        events: Sequence[Event],
        now_s: float,
        worker_id: str = "",
        epoch: int = 0,
        pages_available: int = 0,
    ) -> None:
        """A worker answered commands and reports how many of its pages are available.

        Ignores answers to attempts that have ended.
        """
        self._context.now_s = now_s
        self._computed(self._attempts.answered(events))
        worker = self._workers.find(worker_id, epoch)
        if worker is not None:
            if pages_available > worker.pages_available:
                self._parked.changed = True
            worker.pages_available = pages_available

    def worker_lost(self, worker_id: str, epoch: int, now_s: float, *, crashed: bool = True) -> None:
        """A worker and all its KV are lost. `crashed`: as far as is known, it was not killed on purpose."""
        self._context.now_s = now_s
        worker = self._workers.find(worker_id, epoch)
        if worker is not None:
            self._lose([worker], crashed=crashed)

    def _lose(self, workers: Sequence[WorkerView], *, crashed: bool | None) -> None:
        """Removes workers. Operations are retried after all of them are removed, so never on one of them.

        crashed: None: they live on, so this does not count as a failed attempt.
        """
        computed: list[Operation] = []
        for worker in workers:
            self._workers.remove(worker)
            computed += self._attempts.worker_lost(worker, crashed=crashed)
            self._kv.lose(worker)
        self._begin_again(computed, None if crashed is None else WorkerLost())

    def _begin_again(self, operations: Sequence[Operation], failure: QuireError | None = None) -> None:
        """Begins operations whose attempts have ended. `failure`: why they failed; None: they did not."""
        for operation in operations:
            # Ending an earlier one may have begun a fork that releases this cache, for which this one waits.
            if operation.state is not WAITING:
                is_over = (
                    self._attempts.begin_again(operation)
                    if failure is None
                    else self._attempts.try_again(operation, failure)
                )
                if is_over:
                    self._computed((operation,))

    # Weights.

    def weights_replaced(
        self, weights: int, workers: Sequence[WorkerView], now_s: float, previous: PreviousCaches
    ) -> None:
        """Workers serve other weights of the same config, and have aborted their forwards.

        With KEEP_KV they still have the KV of all caches, otherwise none.

        workers: the same incarnations, with their current state.
        previous: what becomes of existing caches. With END they can only be released.
        """
        self._context.now_s, before = now_s, self.weights.serving
        found = [self._workers.find(worker.worker_id, worker.epoch) for worker in workers]
        known = [worker for worker in found if worker is not None]
        interrupted: list[Operation] = []
        if previous is PreviousCaches.KEEP_KV:
            interrupted = [one for worker in known for one in self._attempts.interrupt(worker)]
        else:
            self._lose(known, crashed=None)
        continues = previous is not PreviousCaches.END
        self.weights.replace(weights, continued_from=self.weights.continued_from if continues else weights)
        if continues:
            continue_caches(self.index, self.operations.values(), self.weights)
        else:
            self._end_weights(before)
        for worker, there in zip(workers, found, strict=True):
            if there is not None and there.is_ready:
                there.weights = weights
            else:
                self.worker_ready(worker, now_s)
        self._begin_again(interrupted)

    def _end_weights(self, weights: int) -> None:
        """Fails the operations that need these weights."""
        affected = [
            operation
            for operation in self.operations.values()
            if any(entry.state.weights == weights for entry in operation.entries)
        ]
        self._finish(
            [
                (operation, WeightsChanged(can_be_repeated=not operation.entry.visible))
                for operation in affected
                if operation.state is not COMMITTING and operation.handler.needs_weights
            ]
        )
        # Releases may have waited behind them.
        self._advance(dict.fromkeys(entry for operation in affected for entry in operation.entries))

    def adapters_in_use(self) -> Counter[int]:
        """How many caches each adapter has. 0: only operations that create a cache use it."""
        used = self.ledger.adapters.copy()
        for operation in self.operations.values():
            used.update({entry.state.adapter: 0 for entry in operation.entries if entry.state.adapter})
        return used

    def adapter_contents(self) -> dict[int, str]:
        """The known digests of the adapters of caches, by the adapter's number."""
        of_caches = ((state.adapter, adapter_digest(state.salt)) for state in self.ledger if state.adapter)
        return {number: digest for number, digest in of_caches if digest}

    def adapters_on(self, worker_id: str) -> Counter[int]:
        """How many caches with KV on a worker each adapter has."""
        held = (entry for w in self._workers if w.worker_id == worker_id for entry in w.held)
        return Counter(entry.state.adapter for entry in held)

    # Time.

    def expire(self, now_s: float, entries: Iterable[CacheEntry]) -> int:
        """Releases those of `entries` that are not in use and whose lease has expired. Returns how many.

        Releases none while the journal cannot be written.
        """
        self._context.now_s, expired = now_s, 0
        for entry in entries if self.admission.journal_works else ():
            if entry.expires_at_s <= now_s and not (entry.busy or entry.closing):
                self._release(entry)
                expired += 1
        return expired

    def tick(self, now_s: float) -> None:
        """Checks the timeouts of parked operations. Call it often while there are any."""
        self._context.now_s = now_s
        # Also check the others: as time passes, more tokens may be replayed.
        self._parked.changed = True
        for operation, error in self._parked.expired():
            self._attempts.failed(operation, error)
            self._computed((operation,))

    # The journal.

    def journal_stalls(self) -> None:
        """A write takes too long: no new operations are accepted until it is durable."""
        self.admission.journal_works = False

    def close(self, refusal: type[QuireError]) -> None:
        """Takes the caches out of all counts, and fails all operations: the gateway ends, or lost them.

        Operations without records in the journal fail with `refusal`. Only the next gateway knows whether the
        records of the others were applied: these fail with GatewayUnavailable.
        """
        operations = [*self.operations.values()]
        entries = {*self.index}.union(*(operation.entries for operation in operations))
        for operation in operations:
            is_unknown = operation.state is COMMITTING
            self._finish([(operation, GatewayUnavailable() if is_unknown else refusal())])
        self.admission.remove(entries)
        # Nothing begins any more, not even what is always admitted.
        self.admission.lease = Lease(valid_until_s=-math.inf)

    # State.

    def __len__(self) -> int:
        return len(self.index)

    @property
    def operations_in_flight(self) -> int:
        return len(self.operations)

    @property
    def expected_wait_s(self) -> float:
        """The estimated queueing delay of a new sequence. inf: there is no worker."""
        return self._workers.expected_wait_s(self.weights.serving)

    @property
    def num_parked(self) -> int:
        """How many operations cannot be computed yet although their turn has come: see `Need`."""
        return len(self._parked.by_ticket)

    def take_effects(self) -> Effects:
        """Returns the effects of all inputs since the last call: one turn. The caller owns the result.

        Parked operations are checked here, once for all these inputs.
        """
        while self._parked.changed and self._parked.by_ticket:
            for operation in self._parked.take_ready():
                if self._attempts.begin_again(operation):
                    self._computed((operation,))
        context = self._context
        # Cheaper than `Effects()`, whose constructor is a Python function.
        effects, context.effects = context.effects, tuple.__new__(Effects, ([], [], []))
        return effects
