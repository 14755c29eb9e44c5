"""The state machine of every cache: fencing, idempotence, order, leases. READ FIRST in the gateway.

No I/O and no clock: requests, workers' answers, workers' deaths and the time come in as calls; commands for
workers, journal records and replies go out through `take_effects()`, in the order they have to happen. So it
can be driven by a seeded simulator, and `check_invariants()` can be called at any moment.

A cache is RESIDENT (its KV is in a worker) or LOST (that worker died). One operation of a cache runs at a
time; the others wait in order, whatever they are. An operation is checked when its turn comes, against the
length that the ones before it left. Its tokens count once the worker has computed them: then the record goes
to the journal, then the reply to the caller. A worker's copy is subordinate: each forward says its position,
and the worker cuts a longer copy to it.

It does not know tokens (the journal does), pages or processes (the workers and the pool do).
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from service.caches.admission import TIME_SHARES, Ahead, Leaving
from service.caches.effects import (
    AbortForward,
    Command,
    CommandDone,
    CommandFailed,
    Effect,
    Event,
    ForkSequence,
    ForwardDone,
    ForwardSequence,
    ReleaseSequences,
    Reply,
    Send,
    TruncateSequence,
    Write,
)
from service.caches.entries import AppliedAppend, CacheEntry, KvState, Operation
from service.caches.listing import Listing
from service.caches.pace import Pace, sleep_s
from service.caches.placement import Placement, WorkerView
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Record,
    TokensAppended,
)
from service.caches.requests import (
    Append,
    Appended,
    Fork,
    Handle,
    Handles,
    Priority,
    Release,
    Released,
    Renew,
    Request,
    Result,
    Truncate,
)
from service.caches.tenants import Tenant
from service.errors import (
    CacheLimit,
    CacheLost,
    CacheNotFound,
    DeadlinePassed,
    Draining,
    InternalError,
    InvalidArgument,
    JournalFull,
    KvExhausted,
    Overloaded,
    PositionMismatch,
    QueueFull,
    QuireError,
    SequenceTooLong,
    TruncateBeyondEnd,
    WorkerLost,
)

# Operations that may wait behind one another on one cache.
MAX_WAITING_PER_CACHE = 64
# What a token takes in the journal, and of an append that is under way.
_TOKEN_BYTES = 4
# What a new cache takes there before it has a second chunk of tokens.
_CACHE_BYTES = 664
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
        # What the journal takes; the dispatcher keeps it, and it counts what is under way here beside it.
        self.journal_bytes = 0
        self._new_cache_id = new_cache_id
        self._new_seed = new_seed
        self._entries: dict[str, CacheEntry] = {}
        self._listing = Listing(self._entries)
        # Those that nobody can see yet, or that keep no cache, are among them.
        self._held = 0
        self._by_request_id: dict[tuple[Tenant, str], CacheEntry] = {}
        self._anonymous = Tenant()
        self._operations: dict[int, Operation] = {}
        self._queued_bytes = 0
        self._placement = Placement()
        self._effects: list[Effect] = []
        self._last_number = 0
        self._pace = Pace()
        # When the present input came.
        self._now_s = 0.0

    # Workers come, answer and go.

    def worker_ready(self, worker: WorkerView) -> None:
        """A worker can take caches. An earlier incarnation must have been reported lost."""
        self._placement.add(worker)

    def worker_capacity(self, worker_id: str, epoch: int, pages_available: int) -> None:
        """A worker said how many pages it has left."""
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            worker.pages_available = pages_available

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        """Whether a worker is silent: new caches then go elsewhere; those it has wait for it."""
        worker = self._placement.find(worker_id, epoch)
        if worker is not None:
            worker.suspect = suspect

    def worker_answered(self, event: Event, now_s: float) -> None:
        """A worker answered a command. Nothing happens if the operation is gone."""
        self._now_s = now_s
        operation = self._operations.get(event.op_id)
        if operation is None:
            return
        match event:
            case ForwardDone():
                self._forward_done(operation, event)
            case CommandDone():
                self._command_done(operation)
            case CommandFailed():
                self._command_failed(operation, event)
        self._advance(operation.entry)

    def worker_lost(self, worker_id: str, epoch: int, now_s: float) -> None:
        """A worker is gone, and all KV in it. Everyone who waits for it is answered."""
        self._now_s = now_s
        worker = self._placement.find(worker_id, epoch)
        if worker is None:
            return
        self._placement.remove(worker)
        for entry in self._entries.values():
            if entry.worker is worker:
                entry.state = KvState.LOST
        for operation in list(self._operations.values()):
            entry = operation.entry
            if entry.worker is worker and entry.running is operation:
                entry.state = KvState.LOST
                self._finish(operation, _lost(entry))
                # Those behind it have answers of their own: a release needs no KV.
                self._advance(entry)

    # Callers ask.

    def submit(self, request: Request, now_s: float, caller: int = 0, tenant: Tenant | None = None) -> int:
        """Takes a request and returns its ticket. Its one Reply is among the effects, now or later.

        `caller` is handed on to the worker, where callers take turns. 0: a caller of its own. Caches of other
        tenants than `tenant` do not exist to it; None: of those who are nobody in particular.
        """
        self._now_s = now_s
        tenant = tenant or self._anonymous
        ticket = self._number()
        if isinstance(request, Release) and self._find(request.cache_id, tenant) is None:
            self._effects.append(Reply(ticket, Released(released=False)))
            return ticket
        try:
            size_bytes = self._admit(request, tenant)
            entry = self._entry_for(request, tenant, caller or -ticket)
        except QuireError as error:
            self._effects.append(Reply(ticket, error.untraced()))
            return ticket
        operation = Operation(ticket, request, entry, caller, now_s, size_bytes=size_bytes)
        if isinstance(request, Append) and request.timeout_s is not None:
            operation.deadline_s = now_s + request.timeout_s
        self._operations[ticket] = operation
        self._queued_bytes += size_bytes
        tenant.in_flight += 1
        entry.waiting.append(operation)
        self._touch(entry)
        self._advance(entry)
        return ticket

    def cancel(self, ticket: int, now_s: float) -> None:
        """The caller has gone: its operation is dropped, what it did is undone, and no Reply follows.

        A release that waits for its turn is carried out all the same.
        """
        self._now_s = now_s
        operation = self._operations.get(ticket)
        if operation is None:
            return
        if isinstance(operation.request, Release):
            operation.is_answered = False
            return
        if operation.entry.running is operation:
            self._undo(operation)
        self._retire(operation, answered=False)
        self._advance(operation.entry)

    def expire(self, now_s: float, at_most: int | None = None) -> int:
        """Releases caches whose lease ran out and that nobody is using. Returns how many."""
        self._now_s = now_s
        ran_out = (e for e in self._entries.values() if e.expires_at_s <= now_s and not e.busy)
        expired = list(itertools.islice(ran_out, at_most))
        for entry in expired:
            self._close(entry)
        return len(expired)

    def handles(self, after: int = 0, tenant: Tenant | None = None) -> Iterator[tuple[int, Handle]]:
        """A tenant's caches, oldest first, each with a number that only grows: those above `after`."""
        for entry in self._listing.after(after, tenant or self._anonymous):
            yield entry.order, entry.handle

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return len(self._operations)

    def take_effects(self) -> list[Effect]:
        """Everything to be done since the last call, in order. The caller owns the list."""
        effects, self._effects = self._effects, []
        return effects

    # Admission.

    def _admit(self, request: Request, tenant: Tenant) -> int:
        """Returns the bytes that the journal will take for it, about.

        Raises Draining, QuotaExceeded, QueueFull or JournalFull. What frees a cache, or keeps it, is always
        let in.
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
                parent = self._find(request.cache_id, tenant)
                shared = 0 if parent is None else parent.length // _TOKENS_PER_SHARED_BYTE
                return request.count * (_CACHE_BYTES + shared)
        return 0

    def _find(self, cache_id: str, tenant: Tenant) -> CacheEntry | None:
        entry = self._entries.get(cache_id)
        return entry if entry is not None and entry.tenant is tenant else None

    def _entry_for(self, request: Request, tenant: Tenant, queue: int) -> CacheEntry:
        """The cache a request is about: a known one, or a new one that nobody can see yet."""
        if isinstance(request, Append) and not request.cache_id:
            repeated = self._by_request_id.get((tenant, request.request_id))
            if repeated is None or repeated.state is KvState.LOST:
                return self._create(request, tenant, queue)
            entry = repeated
        else:
            known = self._find(request.cache_id, tenant)
            if known is None:
                raise CacheNotFound
            entry = known
        if len(entry.waiting) >= MAX_WAITING_PER_CACHE and not isinstance(request, Release | Renew):
            raise QueueFull(MAX_WAITING_PER_CACHE, self._pace.wait_s(len(entry.waiting)))
        return entry

    def _create(self, append: Append, tenant: Tenant, queue: int) -> CacheEntry:
        if not append.is_scoring:
            self._require_room(1)
        tenant.require(caches=1, tokens=len(append.token_ids))
        salt = tenant.salt(append.cache_salt)
        worker = self._placement.choose(append.token_ids, salt)
        if append.timeout_s is not None:
            _require_time(worker.load.look(append, queue), append.timeout_s)
        self._placement.computes(append.token_ids, worker, salt)
        lease_s = self.limits.default_lease_s if append.lease_s is None else append.lease_s
        entry = self._new_entry(worker, min(lease_s, self.limits.max_lease_s), tenant, salt)
        entry.ephemeral = append.is_scoring
        if append.request_id and not entry.ephemeral:
            entry.request_id = append.request_id
            self._by_request_id[tenant, append.request_id] = entry
        return entry

    def _require_room(self, caches: int) -> None:
        """Raises CacheLimit if so many more caches may not be held."""
        if self._held + caches > self.limits.max_caches:
            raise CacheLimit(self.limits.max_caches)

    def _new_entry(self, worker: WorkerView, lease_s: float, tenant: Tenant, salt: bytes) -> CacheEntry:
        worker.sequences += 1
        self._held += 1
        tenant.caches += 1
        return CacheEntry(
            cache_id=self._new_cache_id(),
            number=self._number(),
            worker=worker,
            tenant=tenant,
            salt=salt,
            seed=self._new_seed(),
            lease_s=lease_s,
            expires_at_s=self._now_s + lease_s,
        )

    # An operation starts.

    def _advance(self, entry: CacheEntry) -> None:
        """Starts the next operation, if none runs; drops an entry whose creation came to nothing."""
        while entry.running is None and entry.waiting:
            operation = entry.waiting.popleft()
            entry.running = operation
            try:
                self._start(operation)
            except QuireError as error:
                self._finish(operation, error)
            except Exception as error:
                # A bug of ours, which must not leave the cache waiting for an operation that never began.
                self._finish(operation, _bug(error))
        if not entry.visible and not entry.busy:
            self._discard(entry)

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
                self._close(entry)
            case Renew():
                if request.lease_s is not None:
                    entry.lease_s = min(request.lease_s, self.limits.max_lease_s)
                self._touch(entry)
                self._finish(operation, Handles((entry.handle,)))

    def _start_append(self, operation: Operation, append: Append) -> None:
        entry, last = operation.entry, operation.entry.last_append
        creates_again = entry.visible and not append.cache_id
        position = 0 if creates_again else append.position
        if last is not None and position is not None and last.is_repeated_by(append, position):
            self._answer_again(operation, append, last)
            return
        _require_kv(entry)
        if position is not None and (creates_again or position != entry.length):
            if creates_again and last is not None and position == last.base:
                raise InvalidArgument(
                    "REQUEST_ID_REUSED", "request_id", "the request_id belongs to another request"
                )
            raise PositionMismatch(position, entry.length)
        wanted = entry.length + len(append.token_ids)
        if wanted > entry.worker.capacity_tokens:
            raise SequenceTooLong(wanted, entry.worker.capacity_tokens)
        entry.tenant.require(tokens=len(append.token_ids))
        ahead = entry.worker.load.look(append, operation.queue)
        timeout_s = self._start_within_s(operation, ahead)
        operation.base = entry.length
        operation.tokens = len(append.token_ids)
        entry.tenant.tokens += operation.tokens
        operation.pages = entry.worker.pages_for(len(append.token_ids))
        entry.worker.pages_queued += operation.pages
        self._send_forward(operation, append, entry.number, ahead, timeout_s)

    def _answer_again(self, operation: Operation, append: Append, last: AppliedAppend) -> None:
        """Answers a repeated append without applying it: from memory, or computed on a copy of the cache."""
        entry = operation.entry
        stored = last.answers(append)
        if stored is not None:
            # From memory: so also when the KV is lost.
            self._finish(operation, Appended(entry.handle, stored, last.kept))
            return
        _require_kv(entry)
        ahead = entry.worker.load.look(append, operation.queue)
        timeout_s = self._start_within_s(operation, ahead)
        operation.base = last.base
        operation.copy_number = self._number()
        self._send(entry, ForkSequence(self._number(), entry.number, (operation.copy_number,)))
        self._send_forward(operation, append, operation.copy_number, ahead, timeout_s)

    def _start_within_s(self, operation: Operation, ahead: Ahead) -> float:
        """By when its worker has to begin. Raises Overloaded or DeadlinePassed if it cannot be in time."""
        wait_s = operation.submitted_s + self.limits.max_wait_s - self._now_s
        if operation.deadline_s is None:
            # Short work is hardly ever kept from its turn for so long, and need not be looked at.
            if ahead.is_long:
                _require_turn(ahead, wait_s)
            return wait_s
        left_s = operation.deadline_s - self._now_s
        _require_time(ahead, left_s)
        return min(ahead.start_within_s(left_s), wait_s)

    def _send_forward(
        self, operation: Operation, append: Append, number: int, ahead: Ahead, timeout_s: float
    ) -> None:
        entry, repeats = operation.entry, operation.copy_number is not None
        operation.ahead = ahead
        entry.worker.load.enter(ahead, self._now_s)
        command = ForwardSequence(
            op_id=operation.ticket,
            number=number,
            position=operation.base,
            append=append,
            seed=entry.seed,
            prompt_len=entry.prompt_len if repeats else entry.prompt_len_after(append),
            caller=operation.caller,
            keep_all=repeats,
            ephemeral=repeats or entry.ephemeral,
            salt=entry.salt,
            timeout_s=timeout_s,
        )
        self._send(entry, command)

    def _start_truncate(self, operation: Operation, request: Truncate) -> None:
        entry = operation.entry
        _require_kv(entry)
        if request.new_len > entry.length:
            raise TruncateBeyondEnd(request.new_len, entry.length)
        if request.new_len == entry.length:
            self._finish(operation, Handles((entry.handle,)))
            return
        self._send(entry, TruncateSequence(operation.ticket, entry.number, request.new_len))

    def _start_fork(self, operation: Operation, request: Fork) -> None:
        entry = operation.entry
        _require_kv(entry)
        self._require_room(request.count)
        tokens = request.count * entry.length
        entry.tenant.require(caches=request.count, tokens=tokens)
        operation.children = [
            self._new_entry(entry.worker, entry.lease_s, entry.tenant, entry.salt)
            for _ in range(request.count)
        ]
        operation.tokens = tokens
        entry.tenant.tokens += tokens
        if entry.length == 0:
            # The worker need not know an empty sequence: it may have rolled back the append that began it.
            self._finish_fork(operation, request)
            return
        numbers = tuple(child.number for child in operation.children)
        self._send(entry, ForkSequence(operation.ticket, entry.number, numbers))

    # A worker has answered it.

    def _forward_done(self, operation: Operation, done: ForwardDone) -> None:
        entry, append = operation.entry, operation.request
        assert isinstance(append, Append)
        self._pace.completed(self._now_s)
        self._touch(entry)
        if entry.ephemeral:
            self._finish(operation, Appended(None, done.answer, done.kept))
        elif operation.copy_number is not None:
            assert entry.last_append is not None
            self._finish(operation, Appended(entry.handle, done.answer, entry.last_append.kept))
        else:
            self._apply_append(operation, append, done)
            self._finish(operation, Appended(entry.handle, done.answer, done.kept))

    def _command_done(self, operation: Operation) -> None:
        entry, request = operation.entry, operation.request
        self._touch(entry)
        if isinstance(request, Truncate):
            self._apply_truncate(entry, request.new_len)
            self._finish(operation, Handles((entry.handle,)))
        else:
            assert isinstance(request, Fork)
            self._finish_fork(operation, request)

    def _command_failed(self, operation: Operation, failed: CommandFailed) -> None:
        entry, error = operation.entry, failed.error
        if failed.kv_missing and entry.visible:
            entry.state = KvState.LOST
            error = CacheLost(entry.length)
        if isinstance(error, DeadlinePassed):
            error = self._too_late(operation)
        if isinstance(error, KvExhausted):
            error.retry_after_s = self._pace.wait_s(len(self._operations))
        if operation.copy_number is not None:
            # A forward that never began has not released its copy.
            self._send(entry, ReleaseSequences(self._number(), (operation.copy_number,)))
        self._finish(operation, error)

    def _too_late(self, operation: Operation) -> QuireError:
        """What an append is told whose turn came too late, or not soon enough to be done in time."""
        if operation.deadline_s is not None and self._now_s >= operation.deadline_s:
            return DeadlinePassed()
        waited_s = self._now_s - operation.submitted_s
        return Overloaded(waited_s, waited_s, sleep_s(waited_s))

    def _apply_append(self, operation: Operation, append: Append, done: ForwardDone) -> None:
        entry, base = operation.entry, operation.base
        if not entry.visible:
            self._publish(entry)
            self._write(CacheCreated(entry.cache_id, entry.seed, entry.lease_s))
        entry.prompt_len = entry.prompt_len_after(append)
        entry.resize(base + done.kept)
        entry.last_append = AppliedAppend.of(append, base, done.kept, done.answer)
        kept = append.token_ids[: done.kept]
        self._write(TokensAppended(entry.cache_id, base, kept, entry.prompt_len, entry.worker.epoch))

    def _apply_truncate(self, entry: CacheEntry, new_len: int) -> None:
        if new_len == entry.length:
            return
        entry.resize(new_len)
        entry.prompt_len = min(entry.prompt_len, new_len)
        entry.last_append = None
        self._write(CacheTruncated(entry.cache_id, new_len))

    def _finish_fork(self, operation: Operation, request: Fork) -> None:
        parent, children = operation.entry, operation.children
        operation.children = []
        for child in children:
            child.resize(parent.length)
            child.prompt_len = parent.prompt_len
            # From now, and not from when the fork began.
            child.lease_s, child.expires_at_s = parent.lease_s, parent.expires_at_s
            self._publish(child)
            self._write(CacheForked(child.cache_id, parent.cache_id, child.seed, child.lease_s))
        self._finish(operation, Handles(tuple(child.handle for child in children)))
        for cache_id in request.release:
            released = self._find(cache_id, parent.tenant)
            if released is not None:
                self._close(released)

    def _publish(self, entry: CacheEntry) -> None:
        """From now on callers know the cache by its id."""
        entry.visible = True
        entry.order = self._number()
        self._entries[entry.cache_id] = entry
        self._listing.add(entry)

    # An operation ends.

    def _finish(self, operation: Operation, outcome: Result | QuireError) -> None:
        self._retire(operation, answered=not isinstance(outcome, QuireError))
        entry, request = operation.entry, operation.request
        if isinstance(outcome, QuireError):
            outcome.untraced()
            if isinstance(request, Append) and not entry.visible:
                self._placement.not_computed(request.token_ids, entry.worker, entry.salt)
        if operation.is_answered:
            self._effects.append(Reply(operation.ticket, outcome))

    def _retire(self, operation: Operation, *, answered: bool) -> None:
        """Takes an operation out of every table. Children that were not published are gone with it."""
        entry = operation.entry
        del self._operations[operation.ticket]
        if operation.ahead is not None:
            end = Leaving.ANSWERED
            if not answered:
                end = Leaving.LATE if operation.is_late(self._now_s) else Leaving.TAKEN_BACK
            entry.worker.load.leave(operation.ahead, self._now_s, end)
        entry.worker.pages_queued -= operation.pages
        entry.worker.sequences -= len(operation.children)
        self._held -= len(operation.children)
        self._queued_bytes -= operation.size_bytes
        entry.tenant.caches -= len(operation.children)
        entry.tenant.tokens -= operation.tokens
        entry.tenant.in_flight -= 1
        if entry.running is operation:
            entry.running = None
        else:
            entry.waiting.remove(operation)

    def _undo(self, operation: Operation) -> None:
        """Takes back what a running operation has done, or is about to do, on the worker."""
        entry = operation.entry
        match operation.request:
            case Truncate(new_len=new_len):
                # The pages are gone already: a truncation that has started is carried out.
                self._apply_truncate(entry, new_len)
            case Fork():
                numbers = tuple(child.number for child in operation.children)
                self._send(entry, ReleaseSequences(self._number(), numbers))
            case Append():
                self._send(entry, AbortForward(self._number(), operation.ticket))
                if operation.copy_number is not None:
                    self._send(entry, ReleaseSequences(self._number(), (operation.copy_number,)))
                elif entry.visible:
                    # An answer may be on its way: the worker's copy is then longer than it should be.
                    self._send(entry, TruncateSequence(self._number(), entry.number, operation.base))

    # The end of a cache.

    def _close(self, entry: CacheEntry) -> None:
        """Forgets a cache at once. Operations on it end; the release that asked for it is told so."""
        running = entry.running
        if running is not None and not isinstance(running.request, Truncate):
            self._undo(running)
        del self._entries[entry.cache_id]
        self._write(CacheReleased(entry.cache_id))
        for operation in list(entry.operations()):
            if isinstance(operation.request, Release):
                self._finish(operation, Released(released=operation is running))
            else:
                self._finish(operation, CacheNotFound())
        self._discard(entry)

    def _discard(self, entry: CacheEntry) -> None:
        """Frees what the worker holds of an entry that is in no table any more."""
        key = (entry.tenant, entry.request_id)
        if self._by_request_id.get(key) is entry:
            del self._by_request_id[key]
        entry.worker.sequences -= 1
        self._held -= 1
        entry.tenant.caches -= 1
        entry.resize(0)
        self._send(entry, ReleaseSequences(self._number(), (entry.number,)))

    # Small things.

    def _send(self, entry: CacheEntry, command: Command) -> None:
        """Sends to the worker of an entry, unless that incarnation is gone and its KV with it."""
        worker = entry.worker
        if self._placement.has(worker):
            self._effects.append(Send(worker.worker_id, worker.epoch, command))

    def _write(self, record: Record) -> None:
        self._effects.append(Write(record))

    def _touch(self, entry: CacheEntry) -> None:
        entry.expires_at_s = self._now_s + entry.lease_s

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables contradict each other."""
        operations = self._operations
        assert self._queued_bytes == sum(o.size_bytes for o in operations.values())
        unseen = {id(o.entry) for o in operations.values() if not o.entry.visible}
        forked = sum(len(o.children) for o in operations.values())
        assert self._held == len(self._entries) + len(unseen) + forked
        for ticket, operation in operations.items():
            entry = operation.entry
            assert operation.ticket == ticket
            assert sum(o is operation for o in entry.operations()) == 1, "it runs or waits, exactly once"
            assert entry.running is not None, "an operation waits only behind another"
        for cache_id, entry in self._entries.items():
            assert entry.visible and entry.cache_id == cache_id and not entry.ephemeral
            assert all(operations.get(o.ticket) is o for o in entry.operations())
            assert entry.state is KvState.RESIDENT or not entry.busy, "a lost cache has no operations"
            alive = self._placement.has(entry.worker)
            assert entry.state is KvState.LOST or alive, "a resident cache's worker is alive"
        for worker in self._placement:
            its = [o for o in operations.values() if o.entry.worker is worker]
            assert worker.pages_queued == sum(o.pages for o in its)
            worker.load.check([o.ahead for o in its if o.ahead is not None])
            hidden = {o.entry.number for o in its if not o.entry.visible}
            children = sum(len(o.children) for o in its)
            shown = sum(1 for e in self._entries.values() if e.worker is worker)
            assert worker.sequences == shown + len(hidden) + children
        self._check_tenants()

    def _check_tenants(self) -> None:
        hidden = {o.entry.number: o.entry for o in self._operations.values() if not o.entry.visible}
        entries = [*self._entries.values(), *hidden.values()]
        for tenant in {e.tenant for e in entries} | {self._anonymous}:
            its = [o for o in self._operations.values() if o.entry.tenant is tenant]
            caches = [e for e in entries if e.tenant is tenant]
            assert tenant.in_flight == len(its)
            assert tenant.caches == len(caches) + sum(len(o.children) for o in its)
            assert tenant.tokens == sum(e.length for e in caches) + sum(o.tokens for o in its)


def _require_time(ahead: Ahead, left_s: float) -> None:
    """Raises Overloaded or DeadlinePassed if it cannot be done in time: at once, and before any work."""
    if left_s <= 0:
        raise DeadlinePassed
    expected_s, may_take_s = ahead.expected_s(), left_s * TIME_SHARES[ahead.priority]
    if expected_s > may_take_s:
        raise Overloaded(expected_s, may_take_s, sleep_s(expected_s - may_take_s))


def _require_turn(ahead: Ahead, wait_s: float) -> None:
    """Raises Overloaded if its turn would not come so soon. Its own work may take as long as it takes."""
    expected_s = ahead.expected_s() - ahead.own_s()
    if expected_s > wait_s:
        raise Overloaded(expected_s, max(wait_s, 0.0), sleep_s(expected_s - wait_s))


def _bug(error: Exception) -> InternalError:
    """What its caller is told. Made here, since a frame of the error's traceback must not refer to it."""
    internal = InternalError()
    internal.__cause__ = error
    return internal


def _lost(entry: CacheEntry) -> QuireError:
    """What those are told who wait for KV that is gone."""
    return CacheLost(entry.length) if entry.visible else WorkerLost()


def _require_kv(entry: CacheEntry) -> None:
    """Raises CacheLost or WorkerLost if the KV is gone."""
    if entry.state is KvState.LOST:
        raise _lost(entry)
