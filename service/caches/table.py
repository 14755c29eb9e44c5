"""The state machine of every cache: fencing, idempotence, order, leases. READ FIRST in the gateway.

No I/O and no clock: requests, workers' answers, workers' deaths and the time come in as calls; commands for
workers, journal records and replies go out through `take_effects()`, in the order they have to happen. So it
can be driven by a seeded simulator, and `check_invariants()` can be called at any moment.

A cache is RESIDENT (its KV is in a worker) or LOST (that worker died). One operation of a cache runs at a
time; the others wait in order. An operation is checked when its turn comes, against the length that the ones
before it left. Its tokens count once the worker has computed them: then the record goes to the journal, then
the reply to the caller. A worker's copy is subordinate: each forward says its position, and the worker cuts a
longer copy to it.

It does not know tokens (the journal does), pages or processes (the workers and the pool do).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.v1 import worker_pb2

from service.caches.entries import AppliedAppend, CacheEntry, Operation, State
from service.caches.pace import Pace
from service.caches.placement import PrefixAffinity, WorkerView, choose_worker, pages_for
from service.caches.requests import (
    Append,
    AppendResult,
    Effect,
    ForkRequest,
    Handle,
    HandlesResult,
    Reply,
    Request,
    Result,
    Send,
    TruncateRequest,
    Write,
)
from service.errors import (
    CacheLost,
    CacheNotFound,
    Draining,
    InternalError,
    InvalidArgument,
    KvExhausted,
    NoWorker,
    PositionMismatch,
    QueueFull,
    QuireError,
    SequenceTooLong,
    TruncateBeyondEnd,
    WorkerLost,
)
from service.journal.base import Appended, Created, Forked, Record, Released, Truncated
from service.pool import commands

# Operations that may wait behind one another on one cache.
MAX_WAITING_PER_CACHE = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What the table enforces."""

    max_queued_operations: int = 4096
    default_lease_s: float = 1800.0
    max_lease_s: float = 86_400.0


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
        self._max_seq_len = 0
        self._new_cache_id = new_cache_id
        self._new_seed = new_seed
        self._entries: dict[str, CacheEntry] = {}
        self._by_request_id: dict[str, CacheEntry] = {}
        self._operations: dict[int, Operation] = {}
        self._workers: dict[str, WorkerView] = {}
        self._affinity = PrefixAffinity()
        self._effects: list[Effect] = []
        self._last_number = 0
        self._pace = Pace()

    # Workers come and go.

    def worker_ready(self, worker_id: str, epoch: int, pages_available: int, max_seq_len: int) -> None:
        """A worker can take caches. An earlier incarnation must have been reported lost."""
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is ready already")
        self._max_seq_len = max_seq_len
        self._workers[worker_id] = WorkerView(worker_id, epoch, pages_available, pages_total=pages_available)

    def worker_capacity(self, worker_id: str, epoch: int, pages_available: int) -> None:
        """A worker said how many pages it has left."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.epoch == epoch:
            worker.pages_available = pages_available

    def worker_lost(self, worker_id: str, epoch: int) -> None:
        """A worker is gone, and all KV in it. Everyone who waits for it is answered."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.epoch != epoch:
            return
        del self._workers[worker_id]
        for entry in self._entries.values():
            if entry.worker is worker:
                entry.state = State.LOST
        for operation in list(self._operations.values()):
            entry = operation.entry
            if entry.worker is worker:
                self._forget_request_id(entry)
                self._finish(operation, CacheLost(entry.length) if entry.visible else WorkerLost())

    # Callers ask.

    def submit(self, request: Request, now_s: float, caller: int = 0) -> int:
        """Takes a request and returns its ticket. Its one Reply is among the effects, now or later.

        `caller` is handed on to the worker, where callers take turns. 0: a caller of its own.
        """
        ticket = self._number()
        try:
            self._admit()
            entry = self._entry_for(request, now_s)
        except QuireError as error:
            self._effects.append(Reply(ticket, error))
            return ticket
        operation = Operation(ticket, request, entry, caller)
        self._operations[ticket] = operation
        entry.waiting.append(operation)
        self._touch(entry, now_s)
        self._advance(entry)
        return ticket

    def cancel(self, ticket: int) -> None:
        """The caller has gone: its operation is dropped, what it did is undone, and no Reply follows."""
        operation = self._operations.get(ticket)
        if operation is None:
            return
        if operation.entry.running is operation:
            self._undo(operation)
        self._retire(operation)
        self._advance(operation.entry)

    def release(self, cache_id: str) -> bool:
        """Forgets a cache at once; operations on it end with CacheNotFound. False if it was not known."""
        entry = self._entries.get(cache_id)
        if entry is None:
            return False
        self._close(entry)
        return True

    def renew(self, cache_id: str, lease_s: float | None, now_s: float) -> Handle:
        """Starts a cache's lease anew. Raises CacheNotFound."""
        entry = self._known(cache_id)
        if lease_s is not None:
            entry.lease_s = min(lease_s, self.limits.max_lease_s)
        self._touch(entry, now_s)
        return _handle(entry)

    def expire(self, now_s: float) -> int:
        """Releases the caches whose lease ran out and that nobody is using. Returns how many."""
        expired = [e for e in self._entries.values() if e.expires_at_s <= now_s and not e.busy]
        for entry in expired:
            self._close(entry)
        return len(expired)

    def handles(self) -> Iterator[tuple[int, Handle]]:
        """All caches, oldest first, each with a number that only grows."""
        for entry in self._entries.values():
            yield entry.order, _handle(entry)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return len(self._operations)

    # Workers answer. An answer to an operation that is gone is dropped.

    def forward_done(self, op_id: int, done: worker_pb2.ForwardDone, now_s: float) -> None:
        """A forward was computed: journal it, answer it, let the next one start."""
        operation = self._operations.get(op_id)
        if operation is None:
            return
        entry, append = operation.entry, operation.request
        assert isinstance(append, Append)
        self._pace.completed(now_s)
        self._touch(entry, now_s)
        if entry.ephemeral:
            self._finish(operation, AppendResult(None, done, done.kept))
        elif operation.copy_number is not None:
            assert entry.last_append is not None
            self._finish(operation, AppendResult(_handle(entry), done, entry.last_append.kept))
        else:
            self._apply_append(operation, append, done)
            self._finish(operation, AppendResult(_handle(entry), done, done.kept))
        self._advance(entry)

    def control_done(self, op_id: int, now_s: float) -> None:
        """A truncation or fork was carried out."""
        operation = self._operations.get(op_id)
        if operation is None:
            return
        entry, request = operation.entry, operation.request
        self._touch(entry, now_s)
        if isinstance(request, TruncateRequest):
            self._apply_truncate(entry, request.new_len)
            self._finish(operation, HandlesResult((_handle(entry),)))
        else:
            assert isinstance(request, ForkRequest)
            self._finish_fork(operation, request)
        self._advance(entry)

    def command_failed(self, op_id: int, error: QuireError, *, kv_missing: bool = False) -> None:
        """A worker refused or failed a command; it applied nothing of it.

        kv_missing: the worker has less of the sequence than the table thought, so the cache counts as lost.
        """
        operation = self._operations.get(op_id)
        if operation is None:
            return
        entry = operation.entry
        if kv_missing and entry.visible:
            entry.state = State.LOST
            error = CacheLost(entry.length)
        if isinstance(error, KvExhausted):
            error.retry_after_s = self._pace.wait_s(len(self._operations))
            if not entry.visible and isinstance(operation.request, Append):
                # Its tokens were not computed there after all.
                self._affinity.forget(operation.request.token_ids, entry.worker)
        if operation.copy_number is not None:
            # A forward that never began has not released its copy.
            self._send(entry, commands.release(self._number(), [operation.copy_number]))
        self._finish(operation, error)
        self._advance(entry)

    def take_effects(self) -> list[Effect]:
        """Everything to be done since the last call, in order. The caller owns the list."""
        effects, self._effects = self._effects, []
        return effects

    # Admission.

    def _admit(self) -> None:
        if self.draining:
            raise Draining
        queued = len(self._operations)
        if queued >= self.limits.max_queued_operations:
            raise QueueFull(self.limits.max_queued_operations, self._pace.wait_s(queued))

    def _entry_for(self, request: Request, now_s: float) -> CacheEntry:
        """The cache a request is about: a known one, or a new one that nobody can see yet."""
        if isinstance(request, Append) and not request.cache_id:
            repeated = self._by_request_id.get(request.request_id)
            if repeated is None or repeated.state is State.LOST:
                return self._create(request, now_s)
            entry = repeated
        else:
            entry = self._known(request.cache_id)
        if len(entry.waiting) >= MAX_WAITING_PER_CACHE:
            raise QueueFull(MAX_WAITING_PER_CACHE, self._pace.wait_s(len(entry.waiting)))
        return entry

    def _known(self, cache_id: str) -> CacheEntry:
        entry = self._entries.get(cache_id)
        if entry is None:
            raise CacheNotFound
        return entry

    def _create(self, append: Append, now_s: float) -> CacheEntry:
        worker = choose_worker(list(self._workers.values()), append.token_ids, self._affinity)
        if worker is None:
            raise NoWorker
        self._affinity.record(append.token_ids, worker)
        lease_s = self.limits.default_lease_s if append.lease_s is None else append.lease_s
        entry = self._new_entry(worker, min(lease_s, self.limits.max_lease_s), now_s)
        entry.ephemeral = append.is_scoring
        if append.request_id and not entry.ephemeral:
            entry.request_id = append.request_id
            self._by_request_id[append.request_id] = entry
        return entry

    def _new_entry(self, worker: WorkerView, lease_s: float, now_s: float) -> CacheEntry:
        worker.sequences += 1
        return CacheEntry(
            cache_id=self._new_cache_id(),
            number=self._number(),
            worker=worker,
            seed=self._new_seed(),
            lease_s=lease_s,
            expires_at_s=now_s + lease_s,
        )

    # The life of an operation: start -> (worker) -> apply -> finish.

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
                internal = InternalError()
                internal.__cause__ = error
                self._finish(operation, internal)
        if not entry.visible and not entry.busy:
            self._discard(entry)

    def _start(self, operation: Operation) -> None:
        request = operation.request
        match request:
            case Append():
                self._start_append(operation, request)
            case TruncateRequest():
                self._start_truncate(operation, request)
            case ForkRequest():
                self._start_fork(operation, request)

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
        if wanted > self._max_seq_len:
            raise SequenceTooLong(wanted, self._max_seq_len)
        if pages_for(wanted) > entry.worker.pages_total:
            # However long one waits.
            raise KvExhausted(pages_for(wanted), entry.worker.pages_total, retry_after_s=None)
        operation.base = entry.length
        operation.pages = pages_for(len(append.token_ids))
        entry.worker.pages_queued += operation.pages
        self._send(entry, commands.forward(operation, append, entry.number, entry.length))

    def _answer_again(self, operation: Operation, append: Append, last: AppliedAppend) -> None:
        """Answers a repeated append without applying it: from memory, or computed on a copy of the cache."""
        entry = operation.entry
        stored = last.answers(append)
        if stored is not None:
            # From memory: so also when the KV is lost.
            self._finish(operation, AppendResult(_handle(entry), stored, last.kept))
            return
        _require_kv(entry)
        operation.copy_number = self._number()
        self._send(entry, commands.fork(self._number(), entry.number, [operation.copy_number]))
        self._send(entry, commands.forward(operation, append, operation.copy_number, last.base, replay=True))

    def _start_truncate(self, operation: Operation, request: TruncateRequest) -> None:
        entry = operation.entry
        _require_kv(entry)
        if request.new_len > entry.length:
            raise TruncateBeyondEnd(request.new_len, entry.length)
        if request.new_len == entry.length:
            self._finish(operation, HandlesResult((_handle(entry),)))
            return
        self._send(entry, commands.truncate(operation.ticket, entry.number, request.new_len))

    def _start_fork(self, operation: Operation, request: ForkRequest) -> None:
        entry = operation.entry
        _require_kv(entry)
        for _ in range(request.count):
            child = self._new_entry(entry.worker, entry.lease_s, entry.expires_at_s - entry.lease_s)
            operation.children.append(child)
        if entry.length == 0:
            # The worker need not know an empty sequence: it may have rolled back the append that began it.
            self._finish_fork(operation, request)
            return
        numbers = [child.number for child in operation.children]
        self._send(entry, commands.fork(operation.ticket, entry.number, numbers))

    def _apply_append(self, operation: Operation, append: Append, done: worker_pb2.ForwardDone) -> None:
        entry, base = operation.entry, operation.base
        if not entry.visible:
            self._publish(entry)
            self._write(Created(entry.cache_id, entry.seed, entry.lease_s))
        entry.prompt_len = entry.prompt_len_after(append)
        entry.length = base + done.kept
        entry.last_append = AppliedAppend.of(append, base, done)
        kept = append.token_ids[: done.kept]
        self._write(Appended(entry.cache_id, base, kept, entry.prompt_len, entry.worker.epoch))

    def _apply_truncate(self, entry: CacheEntry, new_len: int) -> None:
        if new_len == entry.length:
            return
        entry.length = new_len
        entry.prompt_len = min(entry.prompt_len, new_len)
        entry.last_append = None
        self._write(Truncated(entry.cache_id, new_len))

    def _finish_fork(self, operation: Operation, request: ForkRequest) -> None:
        parent, children = operation.entry, operation.children
        operation.children = []
        for child in children:
            child.length, child.prompt_len = parent.length, parent.prompt_len
            # From now, and not from when the fork began.
            child.lease_s, child.expires_at_s = parent.lease_s, parent.expires_at_s
            self._publish(child)
            self._write(Forked(child.cache_id, parent.cache_id, child.seed, child.lease_s))
        self._finish(operation, HandlesResult(tuple(_handle(child) for child in children)))
        for cache_id in request.release:
            self.release(cache_id)

    def _publish(self, entry: CacheEntry) -> None:
        """From now on callers know the cache by its id."""
        entry.visible = True
        entry.order = self._number()
        self._entries[entry.cache_id] = entry

    def _finish(self, operation: Operation, outcome: Result | QuireError) -> None:
        self._retire(operation)
        self._effects.append(Reply(operation.ticket, outcome))

    def _retire(self, operation: Operation) -> None:
        """Takes an operation out of every table. Children that were not published are gone with it."""
        entry = operation.entry
        del self._operations[operation.ticket]
        entry.worker.pages_queued -= operation.pages
        entry.worker.sequences -= len(operation.children)
        if entry.running is operation:
            entry.running = None
        else:
            entry.waiting.remove(operation)

    def _undo(self, operation: Operation) -> None:
        """Takes back what a running operation has done, or is about to do, on the worker."""
        entry = operation.entry
        match operation.request:
            case TruncateRequest(new_len=new_len):
                # The pages are gone already: a truncation that has started is carried out.
                self._apply_truncate(entry, new_len)
            case ForkRequest():
                numbers = [child.number for child in operation.children]
                self._send(entry, commands.release(self._number(), numbers))
            case Append():
                self._send(entry, commands.abort(self._number(), operation.ticket))
                if operation.copy_number is not None:
                    self._send(entry, commands.release(self._number(), [operation.copy_number]))
                elif entry.visible:
                    # An answer may be on its way: the worker's copy is then longer than it should be.
                    self._send(entry, commands.truncate(self._number(), entry.number, operation.base))

    # The end of a cache.

    def _close(self, entry: CacheEntry) -> None:
        if entry.running is not None and not isinstance(entry.running.request, TruncateRequest):
            self._undo(entry.running)
        del self._entries[entry.cache_id]
        self._write(Released(entry.cache_id))
        for operation in ([entry.running] if entry.running else []) + list(entry.waiting):
            self._finish(operation, CacheNotFound())
        self._discard(entry)

    def _discard(self, entry: CacheEntry) -> None:
        """Frees what the worker holds of an entry that is in no table any more."""
        self._forget_request_id(entry)
        entry.worker.sequences -= 1
        self._send(entry, commands.release(self._number(), [entry.number]))

    def _forget_request_id(self, entry: CacheEntry) -> None:
        if self._by_request_id.get(entry.request_id) is entry:
            del self._by_request_id[entry.request_id]

    # Small things.

    def _send(self, entry: CacheEntry, command: worker_pb2.WorkerCommand) -> None:
        """Sends to the worker of an entry, unless that incarnation is gone and its KV with it."""
        worker = entry.worker
        if self._workers.get(worker.worker_id) is worker:
            self._effects.append(Send(worker.worker_id, worker.epoch, command))

    def _write(self, record: Record) -> None:
        self._effects.append(Write(record))

    def _touch(self, entry: CacheEntry, now_s: float) -> None:
        entry.expires_at_s = now_s + entry.lease_s

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables contradict each other."""
        seen: set[int] = set()
        for operation in self._operations.values():
            entry = operation.entry
            places = [entry.running is operation, *(w is operation for w in entry.waiting)]
            assert sum(places) == 1, "an operation is running or waiting, exactly once"
            assert operation.ticket not in seen
            seen.add(operation.ticket)
            assert entry.running is not None, "an operation waits only behind another"
        for cache_id, entry in self._entries.items():
            assert entry.visible and entry.cache_id == cache_id and not entry.ephemeral
            for operation in ([entry.running] if entry.running else []) + list(entry.waiting):
                assert self._operations.get(operation.ticket) is operation
            assert entry.state is not State.LOST or not entry.busy, "a lost cache has no operations"
            alive = self._workers.get(entry.worker.worker_id) is entry.worker
            assert entry.state is State.LOST or alive, "a resident cache's worker is alive"
        for worker in self._workers.values():
            operations = [o for o in self._operations.values() if o.entry.worker is worker]
            assert worker.pages_queued == sum(o.pages for o in operations)
            hidden = {o.entry.number for o in operations if not o.entry.visible}
            children = sum(len(o.children) for o in operations)
            shown = sum(1 for e in self._entries.values() if e.worker is worker)
            assert worker.sequences == shown + len(hidden) + children


def _require_kv(entry: CacheEntry) -> None:
    """Raises CacheLost for a cache whose KV is gone."""
    if entry.state is State.LOST:
        raise CacheLost(entry.length)


def _handle(entry: CacheEntry) -> Handle:
    worker = entry.worker
    return Handle(entry.cache_id, entry.length, worker.epoch, worker.worker_id, entry.expires_at_s)
