"""The objects of the state machine: for each cache, request and worker, and for each kind of request.

After the object is created, each field is written only by the module that is named above it.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from service.caches.answers import ForwardDone
from service.caches.ledger import CacheState
from service.caches.records import CacheCreated, Record
from service.caches.requests import Append, Handle, Request, Result
from service.caches.segments import Segment
from service.caches.states import COMMITTING, WAITING, State
from service.caches.tenants import Tenant
from service.caches.worker_load import Forward, WorkerLoad
from service.errors import CacheNotFound, QuireError

# See `CacheEntry.kv_len`.
ALL_KV = sys.maxsize
# A client may cancel so long before the deadline that we know: clocks differ.
_CLOCK_TOLERANCE_S = 0.02


class Need(enum.Enum):
    """What a parked operation waits for."""

    WORKER = enum.auto()
    # Free pages on the worker of its cache.
    PAGES = enum.auto()
    # Workers died while they computed it. A worker computes one such suspect at a time, to find the cause.
    EXCLUSIVE_WORKER = enum.auto()
    # A cache with a common prefix is being replayed. Its pages can be shared afterwards.
    SHARED_PREFIX = enum.auto()
    # Too many tokens to replay were sent within a moment.
    REPLAY_RATE = enum.auto()


Req = TypeVar("Req", bound=Request)
# What comes of an operation without a worker, or after one has computed: an answer, or records to commit.
Change = Result | QuireError | list[Record]


@dataclass(slots=True, eq=False)
class Operation(Forward):
    """A request in the state machine, and all that is known of it until it ends.

    It may be computed in several attempts. Each is one forward, which the operation describes while a worker
    computes it: `base` to `pages`, and the fields of `Forward`.
    """

    request: Request
    kind: OperationKind[Any]
    # Its caches. Only a fork can have several; `entry` is the first.
    entry: CacheEntry
    entries: Sequence[CacheEntry]
    submitted_s: float
    # Reserved in the journal until it ends.
    size_bytes: int = 0
    # The request, if it is an append. Nothing is computed for others.
    append: Append | None = None
    # It has no caller and does not count for its tenant.
    is_internal: bool = False

    # Written along the table in states.py, by the modules that it names.
    state: State = WAITING

    # Written by queues.py. How many of its caches it still waits for; whether its caller gets an answer; the
    # records that are with the journal; the caches that these release.
    turns_left: int = 1
    is_answered: bool = True
    records: Sequence[Record] | None = None
    closes: Sequence[CacheEntry] = ()

    # Written by attempts.py. After how many tokens of the cache it is computed; and the length of the prompt
    # then.
    base: int = 0
    prompt_len: int = 0
    # The number of the temporary copy on which a repeated append is computed. It changes nothing.
    copy_number: int | None = None
    # The forward that a worker computes (0: none): the tokens of the request, or those of the cache that the
    # worker does not have, and where they begin; within which time it has to begin.
    op_id: int = 0
    token_ids: Sequence[int] = ()
    position: int = 0
    timeout_s: float = 0.0
    # Counted in the worker's pages_queued.
    pages: int = 0
    # Of the last worker that had too few: how many pages it needs, and how many were free.
    pages_needed: int = 0
    pages_available: int = 0
    # Failed attempts that are retried.
    failures: int = 0
    # Computed again because the KV was not on the worker.
    replayed_tokens: int = 0
    # What came of its attempts: the answer of the worker, or why there is none. Neither: only KV was needed.
    done: ForwardDone | None = None
    error: QuireError | None = None

    # Written by parked.py. Why it is parked, while it is. Until it begins again: an older operation, for
    # which the KV of its cache was dropped.
    need: Need | None = None
    preempted_for: Operation | None = None
    # The first segment of the cache that it replays. Caches that share it wait for its pages.
    first_segment: Segment | None = None
    # Workers died while they computed this cache. Other such caches wait for its end.
    is_suspect: bool = False

    # Written by append.py: with which weights it was computed.
    weights: int = 0

    # Written by reservations.py: the tokens and caches that it may create.
    tokens: int = 0
    caches: int = 0

    def is_late(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s > self.deadline_s - _CLOCK_TOLERANCE_S


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cache: its durable `state`, and fields that a restart loses."""

    # Names the cache in commands and records.
    number: int
    # For other tenants the cache does not exist.
    tenant: Tenant
    # Of a scoring: removed after its only append.
    ephemeral: bool

    # Written by append.py. The ledger's state, or a draft of it until its creation is durable; the record of
    # its creation until then. The answer to the last append, and the options of that append.
    state: CacheState
    creation: CacheCreated | None = None
    answer: ForwardDone | None = None
    answered: bytes = b""

    # Written by queues.py, in `touch`. The end of its lease, and when it was used last.
    expires_at_s: float = 0.0
    used_s: float = 0.0

    # Written by placement.py. Its worker, if any, which has KV of the first `kv_len` tokens. `ALL_KV`: of all
    # tokens of the cache, also of those that the worker appends.
    worker: WorkerView | None = None
    kv_len: int = 0
    # Whether a command about it was sent to that worker.
    was_sent: bool = False
    # When it was placed last. -inf: not since the gateway started.
    placed_s: float = -math.inf
    # Grows with each placement.
    ownership: int = 0
    # The first tokens that were not truncated since the gateway started.
    unchanged_len: int = sys.maxsize

    # Written by quarantine.py, after workers died while they computed it.
    crash_score: int = 0
    times_blamed: int = 0
    quarantined: bool = False

    # Written by cache_index.py. False until its creation is durable: no caller knows the id before.
    visible: bool = False

    # Written by queues.py. True while its release is with the journal: nothing begins on it.
    closing: bool = False
    running: Operation | None = None
    waiting: deque[Operation] = field(default_factory=deque)

    # Written by reservations.py: how many of its tokens are in the count of the tenant.
    counted: int = 0

    @property
    def length(self) -> int:
        return self.state.tokens.length

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.waiting)

    @property
    def is_committing(self) -> bool:
        """Whether records that change it are with the journal."""
        return self.running is not None and self.running.state is COMMITTING

    @property
    def handle(self) -> Handle:
        """The cache as its caller sees it."""
        worker_id = "" if self.worker is None else self.worker.worker_id
        return Handle(
            self.state.cache_id,
            self.length,
            self.ownership,
            worker_id,
            self.expires_at_s,
            self.state.weights,
            self.state.adapter,
        )

    def has_kv(self, kv_len: int) -> None:
        """Its worker has KV of the first `kv_len` tokens."""
        self.kv_len = kv_len if kv_len < self.length else ALL_KV

    def operations(self) -> Iterator[Operation]:
        """The running and the waiting operations, in order."""
        if self.running is not None:
            yield self.running
        yield from self.waiting


@dataclass(slots=True, eq=False)
class WorkerView:
    """A ready worker."""

    worker_id: str
    epoch: int
    page_tokens: int
    pages_total: int
    # The longest sequence: limited by the context of the model, or by all pages.
    capacity_tokens: int
    # Free or cached pages, as it has last reported.
    pages_available: int
    # Pages of running attempts, which that report may not count yet; written by `Attempts`.
    pages_queued: int = 0
    # The caches whose KV it has, in LRU order; written by `KvPlacement`.
    held: OrderedDict[CacheEntry, None] = field(default_factory=OrderedDict)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # It is silent: it gets no new sequences while there is another worker.
    suspect: bool = False
    # It will be replaced: it gets no new attempts.
    draining: bool = False
    # The weights that it has loaded.
    weights: int = 0
    # Whether this incarnation can take sequences; written by `Workers`.
    is_ready: bool = False

    @property
    def headroom(self) -> int:
        """Pages that are free for a new sequence."""
        return self.pages_available - self.pages_queued

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class OperationKind(Generic[Req]):
    """One kind of request. It decides; the queues carry out."""

    # It is admitted whatever the load is, since it frees a cache or keeps one alive.
    is_always_admitted = False
    # Its records may release caches.
    releases = False
    # It is refused if the weights of its cache are not served.
    needs_weights = True
    # `answer_at_once` may return an answer.
    may_answer_at_once = False

    def answer_at_once(self, request: Req, tenant: Tenant) -> Result | None:
        """The answer to a request that can be answered although its cache does not exist."""
        return None

    def entries(self, request: Req, tenant: Tenant) -> tuple[Sequence[CacheEntry | None], int]:
        """The caches of a request, and about how many bytes the journal needs for it.

        None in the place of each cache that does not exist. 0 bytes: the journal does not grow.
        """
        raise NotImplementedError

    def begin(self, operations: Sequence[Operation]) -> list[tuple[Operation, Change]]:
        """Begins operations whose turn has come. Returns those for which no worker computes anything.

        With an answer, or with why it is refused; or with the records of what it changes.
        """
        raise NotImplementedError

    def computed(self, operations: Sequence[Operation]) -> list[Change]:
        """Workers have computed what these need (see `done`). Returns for each the answer, or the records."""
        raise NotImplementedError

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        """The records of these are applied. Returns their answers."""
        raise NotImplementedError

    def write_failed(self, operation: Operation, request: Req) -> None:
        """Undoes the operation after its records could not be written."""

    def cache_released(self, operation: Operation, request: Req, entry: CacheEntry) -> Result | QuireError:
        """The answer if a cache was released before the turn of the operation came."""
        return CacheNotFound().with_index(operation.entries.index(entry), len(operation.entries))
