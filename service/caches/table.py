"""The state machine of every cache: fencing, idempotence, order, leases. READ FIRST in the gateway.

No I/O and no clock: requests, what workers and the journal answer, workers' deaths and the time come in as
calls; commands for workers, records for the journal and replies go out through `take_effects()`. So it can be
driven by a seeded simulator, and `check_invariants()` can be called at any moment.

What is true of a cache is what its records leave (`ledger.py`): its tokens, and nothing about workers. One
operation of a cache runs at a time; the others wait in order, whatever they are, and one that forks several
caches until its turn has come on each:

    WAITING -> [PARKED, REPLAYING, COMPUTING: what needs a worker; `computing.py`] -> COMMITTING -> answered

An operation is checked when its turn comes, against the length that the ones before it left. What it changes
goes to the journal as records; once they are durable they are applied, and its caller is answered. If they
cannot be written, nothing has happened. Where the KV is (`residence.py`) is no part of this: a cache without
KV is computed again when it is next needed, so no loss of a worker changes what a cache is.

A cache is of the weights that were served when it was created, and so are its forks: it is computed with
those or not at all. When others are served it can be used on for a while, or only be released (`weights_*`).
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.caches.catalog import Catalog, reused_request_id
from service.caches.computing import Computing, bug
from service.caches.effects import (
    Claim,
    Command,
    Effect,
    Event,
    ForkSequence,
    ForwardDone,
    ReleaseSequences,
    Reply,
    Send,
    TruncateSequence,
    Write,
)
from service.caches.entries import CacheEntry, Operation, Phase, StoredAnswer, is_repeated
from service.caches.ledger import CacheState, Ledger, RecordConflict, fingerprint
from service.caches.pace import Pace
from service.caches.placement import Placement, WorkerView
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Child,
    LastAppend,
    LeaseRenewed,
    Record,
    TokensAppended,
    numbers_of,
)
from service.caches.requests import (
    Append,
    Appended,
    Fork,
    Handle,
    Handles,
    Kind,
    Priority,
    Release,
    Released,
    Remembered,
    Renew,
    Request,
    Restore,
    Result,
    Truncate,
)
from service.caches.residence import Residence
from service.caches.restoring import Restoring
from service.caches.tenants import Tenant
from service.caches.trees import path_of
from service.errors import (
    CacheLimit,
    CacheNotFound,
    Draining,
    JournalFull,
    JournalUnavailable,
    NoWorker,
    PositionMismatch,
    QueueFull,
    QuireError,
    TruncateBeyondEnd,
    WeightsChanged,
)

# Operations that may wait behind one another on one cache.
MAX_WAITING_PER_CACHE = 64
# What a token takes in the journal, and of an append that is under way.
_TOKEN_BYTES = 4
# What a new cache takes there before it has a second chunk of tokens.
_CACHE_BYTES = 664
# What somebody new may ask for.
_A_PROMPT = Append(Kind.PREFILL, "", range(256))
# For each token of its parent a fork takes this part of a byte: pointers to what they share.
_TOKENS_PER_SHARED_BYTE = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What the table enforces."""

    max_queued_operations: int = 4096
    default_lease_s: float = 1800.0
    max_lease_s: float = 86_400.0
    max_caches: int = 65_536
    max_journal_bytes: int = 1 << 28
    # How long an operation may wait for its turn, whatever its caller's deadline is.
    max_wait_s: float = 300.0


class CacheTable:
    """Owner of every cache and operation. Single-threaded; times are seconds on one monotonic clock."""

    def __init__(
        self,
        limits: Limits,
        *,
        new_cache_id: Callable[[], str] = lambda: "kv_" + secrets.token_urlsafe(18),
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.limits = limits
        self.draining = False
        # False: the journal could not be written. Nothing is computed that could not be kept.
        self.journal_works = True
        # The weights that new caches are of, and those whose caches may be used beside.
        self.weights = 0
        self._usable: set[int] = set()
        self.ledger = Ledger()
        self._new_cache_id = new_cache_id
        self._new_seed = new_seed
        self._catalog = Catalog()
        # Those that nobody can see yet, or that keep no cache, are among them.
        self._held = 0
        self._anonymous = Tenant()
        self._operations: dict[int, Operation] = {}
        self._queued_bytes = 0
        self._effects: list[Effect] = []
        self._last_number = 0
        self._pace = Pace()
        # When the present input came.
        self._now_s = 0.0
        self._placement = Placement()
        self._residence = Residence(self._send, self._number)
        self._computing = Computing(
            self._placement, self._residence, self, self._send, self._number, limits.max_wait_s
        )
        # While it recovers: when a cache's last record was written.
        self._written_s: dict[int, float] = {}
        # No worker has ever been ready: whoever comes now had better come again.
        self._was_ready = False
        self._restoring = Restoring(self._placement)

    # Before it begins.

    def recovering(self, record: Record, wall_s: float) -> None:
        """A record that the journal has kept, and when it was written. Raises RecordConflict."""
        self.ledger.apply(record)
        for number in numbers_of(record):
            self._written_s[number] = wall_s

    def recovering_run(self, run: TokensAppended, wall_s: float) -> None:
        """Appends of one token each that followed one another, as one record. Raises RecordConflict."""
        self.ledger.apply_run(run)
        self._written_s[run.number] = wall_s

    def recovered(self, *, now_s: float, wall_s: float, tenant_of: Callable[[str], Tenant]) -> None:
        """That were all records: the caches are those of before. Leases have gone on meanwhile."""
        self._now_s = now_s
        for state in sorted(self.ledger, key=lambda state: state.number):
            entry = self._new_entry(state, tenant_of(state.tenant) if state.tenant else self._anonymous)
            # A clock that was set back must not make leases longer than they are.
            age_s = max(0.0, wall_s - self._written_s[state.number])
            entry.expires_at_s = now_s + max(0.0, state.lease_s - age_s)
            entry.used_s = now_s - age_s
            entry.ownership = state.ownership
            self._last_number = max(self._last_number, state.number)
            self._publish(entry)
            entry.count()
            self._was_ready = True
        self._written_s.clear()

    def claims(self, holdings: Mapping[int, int]) -> list[Claim]:
        """What of the sequences that a worker holds is wanted, cut to what the caches are."""
        claims = []
        for number, held_len in holdings.items():
            state = self.ledger.get(number)
            length = 0 if state is None else min(held_len, state.length)
            if state is not None and length:
                claims.append(Claim(number, length, state.tokens.digest(length)))
        return claims

    # Workers come, answer and go.

    def worker_ready(self, worker: WorkerView, now_s: float, kept: Mapping[int, int] | None = None) -> None:
        """A worker can take caches, and has so many tokens of these already, by number.

        An earlier incarnation must have been reported lost.
        """
        self._begin(now_s)
        self._was_ready = True
        self._placement.add(worker)
        unwanted = []
        for number, kept_len in (kept or {}).items():
            entry = self._catalog.numbered(number)
            # It may have been cut, and extended otherwise, since its KV was claimed; or is about to be.
            kv_len = 0 if entry is None else min(kept_len, entry.unchanged_len)
            is_free = entry is not None and entry.home is None and not entry.is_committing
            if entry is not None and is_free and kv_len and entry.state.weights == worker.weights:
                self._residence.settle(entry, worker, now_s, kv_len)
                if kv_len < kept_len:
                    self._send(worker, TruncateSequence(self._number(), number, kv_len))
            else:
                unwanted.append(number)
        if unwanted:
            self._send(worker, ReleaseSequences(self._number(), unwanted))
        self._computing.workers_changed()

    def worker_capacity(self, worker_id: str, epoch: int, pages_available: int) -> None:
        """A worker said how many pages it has left."""
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            if pages_available > worker.pages_available:
                self._computing.workers_changed()
            worker.pages_available = pages_available

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        """Whether a worker is silent: new caches then go elsewhere; those it has wait for it."""
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            worker.suspect = suspect

    def worker_draining(self, worker_id: str, epoch: int, now_s: float) -> None:
        """A worker is to be replaced: what it computes it may finish, and nothing else begins there."""
        self._begin(now_s)
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            worker.draining = True
            idle = [entry for entry in self._residence.held(worker) if not entry.busy]
            for entry in idle:
                self._residence.unsettle(entry)
            self._restoring.later(idle, now_s)

    def is_drained(self, worker_id: str, epoch: int) -> bool:
        """Whether nothing is computed on a worker any more."""
        worker = self._placement.find(worker_id, epoch)
        return worker is None or not any(self._computing.under_way(worker))

    def worker_answered(self, event: Event, now_s: float) -> None:
        """A worker answered a command. Nothing happens if that is not waited for any more."""
        self._begin(now_s)
        self._computing.worker_answered(event)

    def worker_lost(self, worker_id: str, epoch: int, now_s: float, *, crashed: bool = True) -> None:
        """A worker is gone, and all KV in it. `crashed`: by itself, as far as is known."""
        self._begin(now_s)
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            self._placement.remove(worker)
            self._restoring.later(self._computing.worker_lost(worker, crashed=crashed), now_s)

    # Weights come and go.

    def weights_switched(self, weights: int, now_s: float, *, drain: bool) -> None:
        """New caches are of other weights from now on. `drain`: those there are may be used on."""
        self._begin(now_s)
        if drain:
            self._usable.add(self.weights)
        self.weights = weights
        self._computing.workers_changed()

    def weights_drained(self, weights: int, now_s: float) -> None:
        """Caches of these weights may not be used any more; what was asked of them before goes on."""
        self._begin(now_s)
        self._usable.discard(weights)

    def weights_ended(self, weights: int, now_s: float) -> None:
        """Nothing is computed with these weights any more: what has not been ends, and no worker has them."""
        self._begin(now_s)
        self._usable.discard(weights)
        self._restoring.forget(weights)
        its = [o for o in self._operations.values() if _is_about(o, weights)]
        for operation in its:
            if operation.phase is not Phase.COMMITTING and not isinstance(operation.request, Release):
                self._finish(operation, WeightsChanged(can_be_repeated=not operation.entry.visible))
        for worker in [worker for worker in self._placement if worker.weights == weights]:
            self._placement.remove(worker)
            self._residence.lose(worker)
        # Releases may have waited behind them.
        self._advance(*dict.fromkeys(entry for operation in its for entry in operation.entries))

    def uses_of(self, weights: int) -> int:
        """How many operations want something computed with these weights."""
        return sum(
            _is_about(o, weights) and not isinstance(o.request, Release | Restore)
            for o in self._operations.values()
        )

    def weights_of(self, cache_id: str, tenant: Tenant | None = None) -> int | None:
        """The weights of a tenant's cache; None: there is no such cache."""
        entry = self._catalog.find(cache_id, tenant or self._anonymous)
        return None if entry is None else entry.state.weights

    def has_weights(self, weights: int) -> bool:
        """Whether there are caches of these weights."""
        return any(state.weights == weights for state in self.ledger)

    def _can_use(self, weights: int) -> bool:
        return weights == self.weights or weights in self._usable

    # Callers ask.

    def submit(self, request: Request, now_s: float, caller: int = 0, tenant: Tenant | None = None) -> int:
        """Takes a request and returns its ticket. Its one Reply is among the effects, now or later.

        `caller` is handed on to the worker, where callers take turns. 0: a caller of its own. Caches of other
        tenants than `tenant` do not exist to it; None: of those who are nobody in particular.
        """
        self._begin(now_s)
        tenant = tenant or self._anonymous
        ticket = self._number()
        try:
            at_once = self._answer_at_once(request, tenant)
            if at_once is not None:
                self._effects.append(Reply(ticket, at_once))
                return ticket
            size_bytes = self._admit(request, tenant)
            entry, *others = self._entries_for(request, tenant)
        except QuireError as error:
            self._effects.append(Reply(ticket, error.untraced()))
            return ticket
        operation = Operation(ticket, request, entry, caller, now_s, size_bytes=size_bytes, others=others)
        if isinstance(request, Append) and request.timeout_s is not None:
            operation.deadline_s = now_s + request.timeout_s
        for its in operation.entries:
            self._make_way(its, request)
            self._touch(its)
        self._enter(operation)
        self._advance(*operation.entries)
        return ticket

    def cancel(self, ticket: int, now_s: float) -> None:
        """The caller has gone: its operation is dropped, what it did is undone, and no Reply follows.

        What is with the journal, and a release, are carried out all the same.
        """
        self._begin(now_s)
        operation = self._operations.get(ticket)
        if operation is None:
            return
        operation.is_answered = False
        if operation.phase is Phase.COMMITTING or isinstance(operation.request, Release):
            return
        self._retire(operation)
        self._advance(*operation.entries)

    def expire(self, now_s: float, at_most: int | None = None) -> int:
        """Releases caches whose lease ran out and that nobody is using. Returns how many."""
        self._begin(now_s)
        if not self.journal_works:
            # None could be released: who calls again at once would get the same ones.
            return 0
        ran_out = (e for e in self._catalog if e.expires_at_s <= now_s and not e.busy)
        expired = list(itertools.islice(ran_out, at_most))
        for entry in expired:
            self._release(entry)
        return len(expired)

    def tick(self, now_s: float) -> None:
        """Time has passed. To be called often while operations are parked."""
        self._begin(now_s)
        self._computing.tick()

    # The journal answers.

    def committed(self, tickets: Sequence[int], now_s: float) -> None:
        """What these operations wrote is durable."""
        self._begin(now_s)
        self.journal_works = True
        for ticket in tickets:
            self._committed(self._operations[ticket])

    def journal_stalls(self) -> None:
        """What was given to the journal waits for too long: nothing more begins until it is written."""
        self.journal_works = False

    def write_failed(self, tickets: Sequence[int], now_s: float) -> None:
        """What these operations wrote is not durable, and never will be."""
        self._begin(now_s)
        self.journal_works = False
        for ticket in tickets:
            self._not_committed(self._operations[ticket])

    # What there is.

    def handles(self, after: int = 0, tenant: Tenant | None = None) -> Iterator[tuple[int, Handle]]:
        """A tenant's caches, oldest first, each with a number that only grows: those above `after`."""
        for entry in self._catalog.after(after, tenant or self._anonymous):
            yield entry.order, entry.handle

    def recall(self, request_id: str, tenant: Tenant | None = None) -> list[Remembered | None]:
        """The caches that a creation or a fork with this request id has made, as they are now.

        None in the place of those that are gone; empty if all are, or there never were any.
        """
        tenant = tenant or self._anonymous
        entry = self._catalog.made_by(request_id, tenant)
        made = [entry] if entry is not None and entry.visible else self._catalog.children(request_id, tenant)
        return [None if entry is None else _remembered(entry.state) for entry in made]

    def __len__(self) -> int:
        return len(self._catalog)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return len(self._operations)

    @property
    def expected_wait_s(self) -> float:
        """About how long a new sequence would wait for its turn; inf: there is no worker."""
        workers = self._placement.open_workers(self.weights)
        return min((worker.load.look(_A_PROMPT, 0).expected_s() for worker in workers), default=math.inf)

    @property
    def num_parked(self) -> int:
        """Operations that wait for a worker, or for room on one."""
        return self._computing.num_parked

    @property
    def journal_bytes(self) -> int:
        """What is remembered of all caches."""
        return self.ledger.size_bytes

    def take_effects(self) -> list[Effect]:
        """Everything to be done since the last call, in order. The caller owns the list.

        The inputs since then were one turn: what they let go on goes on now, once for all of them.
        """
        self._computing.go_on()
        if self._restoring:
            self._restore_some()
        effects, self._effects = self._effects, []
        return effects

    # Admission.

    def _answer_at_once(self, request: Request, tenant: Tenant) -> Result | None:
        """The answer to what needs no cache to be there."""
        if isinstance(request, Append):
            return None
        if isinstance(request, Release) and self._catalog.find(request.cache_id, tenant) is None:
            return Released(released=False)
        if isinstance(request, Fork) and None in self._parents(request, tenant):
            # It may have released its parents.
            made = self._catalog.forked_by(request, tenant)
            children = self._catalog.children(request.request_id, tenant) if made is not None else []
            if not all(child is None or self._can_use(child.state.weights) for child in children):
                raise WeightsChanged
            return made
        return None

    def _admit(self, request: Request, tenant: Tenant) -> int:
        """Returns the bytes that the journal will take for it, about.

        Raises Draining, QuotaExceeded, QueueFull, JournalUnavailable or JournalFull. What frees a cache, or
        keeps it, is always let in.
        """
        if isinstance(request, Release | Renew):
            return 0
        if self.draining:
            raise Draining
        tenant.take_turn(self._now_s)
        queued = len(self._operations)
        most = self.limits.max_queued_operations
        if queued >= most / 2 and isinstance(request, Append) and request.priority is Priority.LOW:
            raise QueueFull(math.ceil(most / 2), self._pace.wait_s(queued))
        if queued >= most:
            raise QueueFull(most, self._pace.wait_s(queued))
        if not self.journal_works and not (isinstance(request, Append) and request.is_scoring):
            raise JournalUnavailable
        size_bytes = self._journal_bytes_of(request, tenant)
        full = self.journal_bytes + self._queued_bytes + size_bytes > self.limits.max_journal_bytes
        if full and not isinstance(request, Truncate):
            raise JournalFull(self.limits.max_journal_bytes)
        return size_bytes

    def _journal_bytes_of(self, request: Request, tenant: Tenant) -> int:
        """About what the journal will take for a request."""
        match request:
            case Append():
                creates = not request.cache_id and not request.is_scoring
                return _TOKEN_BYTES * len(request.token_ids) + _CACHE_BYTES * creates
            case Fork():
                parents = zip(request.sources, self._parents(request, tenant), strict=True)
                return sum(
                    source.count * (_CACHE_BYTES + parent.length // _TOKENS_PER_SHARED_BYTE)
                    for source, parent in parents
                    if parent is not None
                )
        return 0

    def _parents(self, fork: Fork, tenant: Tenant) -> list[CacheEntry | None]:
        return [self._catalog.find(source.cache_id, tenant) for source in fork.sources]

    def _entries_for(self, request: Request, tenant: Tenant) -> Sequence[CacheEntry]:
        """The caches a request is about: known ones, or a new one that nobody can see yet."""
        if isinstance(request, Fork):
            known = self._parents(request, tenant)
        elif isinstance(request, Append) and not request.cache_id:
            repeated = self._catalog.made_by(request.request_id, tenant)
            if repeated is None:
                return (self._create(request, tenant),)
            known = [repeated]
        else:
            known = [self._catalog.find(request.cache_id, tenant)]
        entries = []
        for index, entry in enumerate(known):
            try:
                if entry is None:
                    raise CacheNotFound
                self._require_turn(entry, request)
            except QuireError as error:
                raise error.of_one(index, len(known)) from None
            entries.append(entry)
        return entries

    def _require_turn(self, entry: CacheEntry, request: Request) -> None:
        """Raises WeightsChanged or QueueFull if a request may not wait for its turn on a cache."""
        if not isinstance(request, Release):
            self._require_weights(entry, request)
        if len(entry.waiting) >= MAX_WAITING_PER_CACHE and not isinstance(request, Release | Renew):
            raise QueueFull(MAX_WAITING_PER_CACHE, self._pace.wait_s(len(entry.waiting)))

    def _require_weights(self, entry: CacheEntry, request: Request) -> None:
        """Raises WeightsChanged if the cache may not be used, or the request is meant for others."""
        weights = entry.state.weights
        checked = request.weights if isinstance(request, Append) else None
        if not self._can_use(weights) or checked not in (None, weights):
            raise WeightsChanged

    def _create(self, append: Append, tenant: Tenant) -> CacheEntry:
        if not append.is_scoring:
            self._require_room(1)
        tenant.require(caches=1, tokens=len(append.token_ids))
        if not self._was_ready:
            raise NoWorker
        weights = self.weights if append.weights is None else append.weights
        if not self._can_use(weights):
            raise WeightsChanged(can_be_repeated=True)
        lease_s = self.limits.default_lease_s if append.lease_s is None else append.lease_s
        state = CacheState(
            number=self._number(),
            cache_id=self._new_cache_id(),
            tenant=tenant.name,
            salt=tenant.salt(append.cache_salt),
            seed=self._new_seed(),
            lease_s=min(lease_s, self.limits.max_lease_s),
            request_id="" if append.is_scoring else append.request_id,
            weights=weights,
        )
        entry = self._new_entry(state, tenant)
        entry.ephemeral = append.is_scoring
        self._catalog.begin(entry)
        return entry

    def _require_room(self, caches: int) -> None:
        """Raises CacheLimit if so many more caches may not be held."""
        if self._held + caches > self.limits.max_caches:
            raise CacheLimit(self.limits.max_caches)

    def _new_entry(self, state: CacheState, tenant: Tenant) -> CacheEntry:
        self._held += 1
        tenant.caches += 1
        return CacheEntry(state, tenant, expires_at_s=self._now_s + state.lease_s, used_s=self._now_s)

    # An operation starts.

    def _make_way(self, entry: CacheEntry, request: Request) -> None:
        """What needs no KV does not wait until it has been restored ahead of time."""
        running = entry.running
        if running is not None and isinstance(running.request, Restore) and not isinstance(request, Append):
            self._retire(running)

    def _enter(self, operation: Operation) -> None:
        """It waits for its turn."""
        self._operations[operation.ticket] = operation
        self._queued_bytes += operation.size_bytes
        operation.entry.tenant.in_flight += not operation.is_ours
        # On all of its caches at once: of two operations the same one is first wherever they meet, so that of
        # those that wait for one another the oldest waits for none, and no circle of them can be.
        for entry in operation.entries:
            entry.waiting.append(operation)

    def _advance(self, *entries: CacheEntry) -> None:
        """Starts the next operation of each, if none runs; drops an entry whose creation came to nothing."""
        # Not by recursion: one fork that ends at once may let another of other caches go on, and so forth.
        left = deque(entries)
        while left:
            entry = left.popleft()
            while entry.running is None and entry.waiting and not entry.closing:
                operation = entry.waiting.popleft()
                entry.running = operation
                operation.turns += 1
                if operation.has_turn:
                    self._start_or_refuse(operation)
                    if operation.others:
                        left += (its for its in operation.entries if its is not entry)
            if entry.busy:
                continue
            if not entry.visible:
                self._discard(entry)
            elif entry.home is not None and entry.home.draining:
                self._residence.unsettle(entry)
                self._restoring.later((entry,), self._now_s)

    def _start_or_refuse(self, operation: Operation) -> None:
        try:
            self._start(operation)
        except QuireError as error:
            self._finish(operation, error)
        except Exception as error:
            # A bug of ours, which must not leave the cache waiting for an operation that never began.
            self._finish(operation, bug(error))

    def _start(self, operation: Operation) -> None:
        entry, request = operation.entry, operation.request
        match request:
            case Append():
                self._start_append(operation, request)
            case Truncate():
                self._start_truncate(operation, request)
            case Fork():
                self._start_fork(operation, request)
            case Release():
                self._commit(operation, (CacheReleased(entry.number),))
            case Renew():
                lease_s = entry.state.lease_s if request.lease_s is None else request.lease_s
                renewed = LeaseRenewed(entry.number, min(lease_s, self.limits.max_lease_s))
                self._commit(operation, (renewed,))
            case Restore():
                operation.base = entry.length
                self._computing.start(operation)

    def _start_append(self, operation: Operation, append: Append) -> None:
        entry, last = operation.entry, operation.entry.last
        creates_again = entry.visible and not append.cache_id
        position = 0 if creates_again else append.position
        if last is not None and position is not None and is_repeated(last, append, position):
            if entry.answer is not None and entry.answer.answers(append):
                # From memory: no worker is needed for it.
                path = self._kept_path(entry, append, last)
                self._finish(operation, Appended(entry.handle, entry.answer.answer, last.kept, path=path))
                return
            operation.base, operation.copy_number = last.base, self._number()
            self._computing.start(operation)
            return
        if position is not None and (creates_again or position != entry.length):
            if creates_again and last is not None and position == last.base:
                raise reused_request_id()
            raise PositionMismatch(position, entry.length)
        entry.tenant.require(tokens=len(append.token_ids))
        operation.base, operation.tokens = entry.length, len(append.token_ids)
        entry.tenant.tokens += operation.tokens
        self._computing.start(operation)

    def _start_truncate(self, operation: Operation, request: Truncate) -> None:
        entry = operation.entry
        # Cut already, it would be cut to the same length again.
        repeats = request.new_len == entry.length
        if request.position not in (None, entry.length) and not repeats:
            raise PositionMismatch(request.position or 0, entry.length)
        if request.new_len > entry.length:
            raise TruncateBeyondEnd(request.new_len, entry.length)
        if repeats:
            self._finish(operation, Handles((entry.handle,)))
            return
        self._commit(operation, (CacheTruncated(entry.number, request.new_len),))

    def _start_fork(self, operation: Operation, request: Fork) -> None:
        entries, tenant = operation.entries, operation.entry.tenant
        made = self._catalog.forked_by(request, tenant)
        if made is not None:
            self._finish(operation, made)
            return
        count, tokens = request.count, 0
        for index, (source, entry) in enumerate(zip(request.sources, entries, strict=True)):
            if source.position not in (None, entry.length):
                mismatch = PositionMismatch(source.position or 0, entry.length)
                raise mismatch.of_one(index, len(entries))
            tokens += source.count * entry.length
        self._require_room(count)
        tenant.require(caches=count, tokens=tokens)
        self._catalog.begin_fork(request, tenant)
        operation.caches, operation.tokens = count, tokens
        self._held += count
        tenant.caches += count
        tenant.tokens += tokens
        records: list[Record] = list(self._forked(request, entries))
        records += [CacheReleased(e.number) for e in self._start_closing(operation, request)]
        self._commit(operation, records)

    def _forked(self, request: Fork, parents: Sequence[CacheEntry]) -> Iterator[CacheForked]:
        """What a fork writes of the children of each parent that has any."""
        total, first = request.count if len(parents) > 1 else 0, 0
        for source, parent in zip(request.sources, parents, strict=True):
            children = tuple(
                Child(self._number(), self._new_cache_id(), self._new_seed()) for _ in range(source.count)
            )
            if children:
                yield CacheForked(parent.number, children, request.request_id, total, first)
            first += total and source.count

    def _start_closing(self, operation: Operation, request: Fork) -> Iterator[CacheEntry]:
        """The caches that a fork releases: what runs there is stopped, and nothing begins any more."""
        for cache_id in dict.fromkeys(request.release):
            entry = self._catalog.find(cache_id, operation.entry.tenant)
            if entry is None or entry.closing:
                continue
            running = entry.running
            if running is not None and running is not operation:
                if running.phase is not Phase.COMMITTING:
                    self._back_to_the_start(running, entry)
                elif isinstance(running.request, Release):
                    continue
            entry.closing = True
            yield entry

    def _back_to_the_start(self, operation: Operation, entry: CacheEntry) -> None:
        """Stops what runs on a cache, so that it is the next to run. It may find that its cache has gone."""
        self._computing.stop(operation)
        self._finish_reserving(operation)
        operation.copy_number = None
        operation.turns -= 1
        operation.phase, operation.need = Phase.WAITING, None
        entry.running = None
        entry.waiting.appendleft(operation)

    # It has been computed, or will not be: what `computing` says.

    def computed(self, operation: Operation, done: ForwardDone | None) -> None:
        """See `Outcomes`."""
        entry, append = operation.entry, operation.request
        if done is None or not isinstance(append, Append):
            self._finish(operation, Handles((entry.handle,)))
        elif entry.ephemeral:
            self._pace.completed(self._now_s)
            self._finish(operation, Appended(None, done.answer, done.kept, operation.replayed_tokens))
        elif operation.copy_number is not None:
            assert entry.last is not None
            self._touch(entry)
            replayed = operation.replayed_tokens
            path = self._kept_path(entry, append, entry.last)
            self._finish(operation, Appended(entry.handle, done.answer, entry.last.kept, replayed, path))
        else:
            self._pace.completed(self._now_s)
            operation.done = done
            self._commit(operation, self._records_of(operation, append, done))
            return
        self._advance(entry)

    def not_computed(self, operation: Operation, error: QuireError) -> None:
        """See `Outcomes`."""
        self._finish(operation, error)
        self._advance(operation.entry)

    def _kept_path(self, entry: CacheEntry, append: Append, last: LastAppend) -> Sequence[int]:
        """Of a tree, the last append, the indexes of what it kept: the journal has the tokens."""
        kept = entry.state.tokens.between(last.base, last.base + last.kept)
        return path_of(append.token_ids, append.parents, kept) if append.parents else ()

    def _records_of(self, operation: Operation, append: Append, done: ForwardDone) -> Sequence[Record]:
        """What an append writes that has been computed."""
        entry, state = operation.entry, operation.entry.state
        records: list[Record] = []
        if not entry.visible:
            records.append(
                CacheCreated(
                    state.number,
                    state.cache_id,
                    state.tenant,
                    state.salt,
                    state.seed,
                    state.lease_s,
                    state.request_id,
                    state.weights,
                )
            )
        if append.parents:
            tokens: Sequence[int] = [append.token_ids[index] for index in done.path]
            asked = fingerprint(append.token_ids, append.parents)
        else:
            kept_all = done.kept == len(append.token_ids)
            tokens = append.token_ids if kept_all else append.token_ids[: done.kept]
            asked = b"" if kept_all else fingerprint(append.token_ids)
        records.append(
            TokensAppended(
                entry.number,
                operation.base,
                tokens,
                entry.prompt_len_after(append),
                entry.ownership,
                append.accept,
                asked,
            )
        )
        return records

    # With the journal.

    def _commit(self, operation: Operation, records: Sequence[Record]) -> None:
        operation.phase, operation.need, operation.records = Phase.COMMITTING, None, records
        self._effects.append(Write(operation.ticket, records))

    def _committed(self, operation: Operation) -> None:
        entry, request = operation.entry, operation.request
        try:
            for record in operation.records:
                self.ledger.apply(record)
        except RecordConflict as error:
            # A bug of ours: what was checked when it began is not so any more.
            self._not_carried_out(operation, bug(error))
            return
        for its in operation.entries:
            self._touch(its)
        match request:
            case Append():
                self._apply_append(operation, request)
            case Truncate():
                self._apply_truncate(operation, request)
            case Fork():
                self._apply_fork(operation, request)
            case Release():
                self._close(entry)
            case _:
                self._finish(operation, Handles((entry.handle,)))
        self._advance(*operation.entries)

    def _not_committed(self, operation: Operation) -> None:
        entry, request = operation.entry, operation.request
        if isinstance(request, Append) and entry.home is not None and entry.visible:
            # The worker has what the cache does not.
            self._send(entry.home, TruncateSequence(self._number(), entry.number, operation.base))
        self._not_carried_out(operation, JournalUnavailable())

    def _not_carried_out(self, operation: Operation, error: QuireError) -> None:
        """What its records say is not so: what waited for that goes on."""
        self._finish(operation, error)
        released = self._released_by(operation)
        for closing in released:
            closing.closing = False
        self._advance(*operation.entries, *released)

    def _released_by(self, operation: Operation) -> list[CacheEntry]:
        """The caches that a fork's records release."""
        if not isinstance(operation.request, Fork):
            return []
        released = [record for record in operation.records if isinstance(record, CacheReleased)]
        found = [self._catalog.numbered(record.number) for record in released]
        return [entry for entry in found if entry is not None]

    def _apply_append(self, operation: Operation, append: Append) -> None:
        entry, done = operation.entry, operation.done
        assert done is not None
        if not entry.visible:
            state = self.ledger.get(entry.number)
            assert state is not None
            entry.state = state
            self._publish(entry)
        entry.answer = None
        if append.keeps_answer:
            entry.answer = StoredAnswer(
                append.rows,
                append.scored,
                append.choices,
                append.sample_seeds,
                append.output,
                done.answer,
            )
        if entry.home is not None:
            entry.kv_len = entry.length
        unseen = not (operation.is_answered or append.cache_id or append.request_id)
        replayed = operation.replayed_tokens
        self._finish(operation, Appended(entry.handle, done.answer, done.kept, replayed, done.path))
        entry.count()
        if unseen:
            self._release(entry)

    def _apply_truncate(self, operation: Operation, request: Truncate) -> None:
        entry = operation.entry
        entry.count()
        entry.answer = None
        entry.unchanged_len = min(entry.unchanged_len, request.new_len)
        if entry.home is not None and entry.kv_len > request.new_len:
            entry.kv_len = request.new_len
            self._send(entry.home, TruncateSequence(self._number(), entry.number, request.new_len))
        self._finish(operation, Handles((entry.handle,)))

    def _apply_fork(self, operation: Operation, request: Fork) -> None:
        released = self._released_by(operation)
        self._finish_reserving(operation)
        children: list[CacheEntry] = []
        for record in operation.records:
            if isinstance(record, CacheForked):
                children += self._born_of(record)
        unseen = not (operation.is_answered or request.request_id)
        self._finish(operation, Handles(tuple(child.handle for child in children)))
        self._close(*released)
        for child in children if unseen else ():
            self._release(child)

    def _born_of(self, record: CacheForked) -> list[CacheEntry]:
        """The children of one parent, on its worker if it is on one."""
        parent = self._catalog.numbered(record.parent)
        assert parent is not None
        numbers = tuple(child.number for child in record.children)
        children = [self._born(number, parent) for number in numbers]
        if parent.home is not None and parent.kv_len:
            self._send(parent.home, ForkSequence(self._number(), parent.number, numbers))
            for child in children:
                self._residence.settle(child, parent.home, self._now_s, parent.kv_len)
                child.ownership = 1
        return children

    def _born(self, number: int, parent: CacheEntry) -> CacheEntry:
        state = self.ledger.get(number)
        assert state is not None
        child = self._new_entry(state, parent.tenant)
        self._publish(child)
        child.count()
        return child

    def _publish(self, entry: CacheEntry) -> None:
        """From now on callers know the cache by its id."""
        entry.visible = True
        entry.order = self._number()
        self._catalog.add(entry)

    # An operation ends.

    def _finish(self, operation: Operation, outcome: Result | QuireError) -> None:
        entry, request = operation.entry, operation.request
        if isinstance(outcome, QuireError):
            outcome.untraced()
            if isinstance(request, Append) and not entry.visible and entry.home is not None:
                self._placement.not_computed(request.token_ids, entry.home, entry.state.salt)
        self._retire(operation)
        if operation.is_answered:
            self._effects.append(Reply(operation.ticket, outcome))

    def _retire(self, operation: Operation) -> None:
        """Takes an operation out of every table."""
        entry = operation.entry
        if operation.phase is not Phase.COMMITTING:
            self._computing.stop(operation)
        del self._operations[operation.ticket]
        self._finish_reserving(operation)
        self._queued_bytes -= operation.size_bytes
        entry.tenant.in_flight -= not operation.is_ours
        if isinstance(operation.request, Restore):
            self._restoring.under_way -= 1
        if isinstance(operation.request, Fork) and operation.phase is Phase.COMMITTING:
            self._catalog.end_fork(operation.request, entry.tenant)
        for its in operation.entries:
            if its.running is operation:
                its.running = None
            else:
                its.waiting.remove(operation)

    def _finish_reserving(self, operation: Operation) -> None:
        """What it was about to make is there, or will not be."""
        tenant = operation.entry.tenant
        self._held -= operation.caches
        tenant.caches -= operation.caches
        tenant.tokens -= operation.tokens
        operation.caches = operation.tokens = 0

    # The end of a cache.

    def _release(self, entry: CacheEntry) -> None:
        """Releases a cache for nobody: its lease ran out, or its maker had gone before he knew it."""
        self._begin_ours(entry, Release(entry.state.cache_id))

    def _close(self, *entries: CacheEntry) -> None:
        """Caches are released. Operations on them end; the release that asked for it is told so."""
        others: list[CacheEntry] = []
        for entry in entries:
            running = entry.running
            for operation in list(entry.operations()) if entry.busy else ():
                if isinstance(operation.request, Release):
                    self._finish(operation, Released(released=operation is running))
                else:
                    self._finish(operation, self._gone(operation, entry))
                others += [its for its in operation.entries if its is not entry]
        self._discard(*entries)
        # Forks of these, too, do not wait there any more.
        self._advance(*others)

    def _gone(self, operation: Operation, entry: CacheEntry) -> Result | QuireError:
        """What an operation is told that finds one of its caches released."""
        try:
            made = None
            if isinstance(operation.request, Fork):
                made = self._catalog.forked_by(operation.request, operation.entry.tenant)
        except QuireError as error:
            return error
        if made is not None:
            return made
        return CacheNotFound().of_one(operation.entries.index(entry), len(operation.entries))

    def _discard(self, *entries: CacheEntry) -> None:
        """Frees what is held of entries that are in no table any more."""
        self._residence.unsettle(*entries)
        self._held -= len(entries)
        for entry in entries:
            self._catalog.remove(entry)
            entry.tenant.caches -= 1
            entry.count(0)

    # KV that is gone is computed again before anyone asks.

    def _restore_some(self) -> None:
        while (entry := self._restoring.next()) is not None:
            if self._catalog.numbered(entry.number) is entry:
                restore = Restore(entry.state.cache_id)
                self._restoring.under_way += 1
                self._begin_ours(entry, restore)

    def _begin_ours(self, entry: CacheEntry, request: Release | Restore) -> None:
        """Something that nobody has asked for, and nobody is told of."""
        operation = Operation(self._number(), request, entry, 0, self._now_s, is_answered=False, is_ours=True)
        self._enter(operation)
        self._advance(entry)

    # Small things.

    def _begin(self, now_s: float) -> None:
        """An input comes."""
        self._now_s = self._computing.now_s = now_s

    def _send(self, worker: WorkerView, command: Command) -> None:
        """Sends to a worker, unless that incarnation is gone and its KV with it."""
        if self._placement.has(worker):
            self._effects.append(Send(worker.worker_id, worker.epoch, command))

    def _touch(self, entry: CacheEntry) -> None:
        entry.expires_at_s = self._now_s + entry.state.lease_s
        entry.used_s = self._now_s
        self._residence.used(entry)

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables contradict each other."""
        operations = self._operations
        assert self._queued_bytes == sum(o.size_bytes for o in operations.values())
        unseen = {o.entry.number: o.entry for o in operations.values() if not o.entry.visible}
        forked = sum(o.caches for o in operations.values())
        assert self._held == len(self._catalog) + len(unseen) + forked
        assert self._restoring.under_way == sum(isinstance(o.request, Restore) for o in operations.values())
        for ticket, operation in operations.items():
            entry = operation.entry
            assert operation.ticket == ticket
            for its in operation.entries:
                assert sum(o is operation for o in its.operations()) == 1, "it runs or waits, exactly once"
                assert its.tenant is entry.tenant
                assert its.running is not None or its.closing, "an operation waits only behind another"
            assert operation.turns == sum(its.running is operation for its in operation.entries)
            assert operation.has_turn is (operation.phase is not Phase.WAITING)
            assert not operation.others or isinstance(operation.request, Fork)
        self._catalog.check()
        entries = {entry.number: entry for entry in self._catalog} | unseen
        assert len(self.ledger) == len(self._catalog)
        for entry in entries.values():
            assert entry.home is None or entry.home.weights == entry.state.weights, "computed with its own"
        for entry in self._catalog:
            assert self.ledger.get(entry.number) is entry.state, "what is kept is kept once"
            assert all(operations.get(o.ticket) is o for o in entry.operations())
            assert entry.kv_len <= entry.length and (entry.home is not None or not entry.kv_len)
            assert entry.ownership >= entry.state.ownership
        self._residence.check(entries)
        self._computing.check(operations)
        self._check_tenants(entries)

    def _check_tenants(self, entries: Mapping[int, CacheEntry]) -> None:
        for tenant in {entry.tenant for entry in entries.values()} | {self._anonymous}:
            its = [o for o in self._operations.values() if o.entry.tenant is tenant]
            caches = [entry for entry in entries.values() if entry.tenant is tenant]
            assert tenant.in_flight == sum(not o.is_ours for o in its)
            assert tenant.caches == len(caches) + sum(o.caches for o in its)
            assert tenant.tokens == sum(e.length for e in caches) + sum(o.tokens for o in its)


def _is_about(operation: Operation, weights: int) -> bool:
    """Whether a cache of these weights is among those that an operation is about."""
    return any(entry.state.weights == weights for entry in operation.entries)


def _remembered(state: CacheState) -> Remembered:
    return Remembered(state.cache_id, state.tokens.copy(), state.weights)
