"""The objects of the state machine: caches, operations, workers, and the interface of request handlers.

After creation, each field is written only by the module that the comment above it names.
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
from service.caches.requests import Handle, Release, Request, Result
from service.caches.segments import Segment
from service.caches.states import COMMITTING, WAITING, State
from service.caches.tenants import Tenant
from service.caches.worker_load import QueuedForward, WorkerLoad
from service.errors import CacheNotFound, QuireError

# See `CacheEntry.kv_len`.
ALL_KV = sys.maxsize
# Clocks differ: a client may cancel up to this long before the deadline that we computed.
_CLOCK_TOLERANCE_S = 0.02


class Need(enum.Enum):
    """What a parked operation waits for."""

    WORKER = enum.auto()
    # Free pages on the worker of its cache.
    PAGES = enum.auto()
    # Its turn as a suspect: workers died while they computed its cache. To find the cause, a worker computes
    # one suspect at a time.
    EXCLUSIVE_WORKER = enum.auto()
    # The end of the replay of a cache with a common prefix, whose pages it can share then.
    SHARED_PREFIX = enum.auto()
    # The limit on tokens that are replayed at once.
    REPLAY_RATE = enum.auto()


Req = TypeVar("Req", bound=Request)
# What a handler returns for an operation: an answer, an error, or records to commit.
Change = Result | QuireError | list[Record]


@dataclass(slots=True, eq=False)
class Operation(QueuedForward):
    """A request in the state machine, from its admission to its end.

    It may take several attempts. Each is one forward. The fields `base` to `pages`, and those of
    `QueuedForward`, describe the forward that a worker computes now.
    """

    # Only an append is computed.
    request: Request
    handler: RequestHandler[Any]
    # Its caches. Only a fork can have several; `entry` is the first.
    entry: CacheEntry
    entries: Sequence[CacheEntry]
    submitted_s: float
    # Bytes reserved in the journal until it ends.
    size_bytes: int = 0
    # It has no caller and does not count for its tenant.
    is_internal: bool = False

    # Written by the modules that states.py names.
    state: State = WAITING

    # Written by queues.py: how many of its caches it still waits for; whether its caller gets an answer; the
    # records that are with the journal; the caches that these release.
    turns_left: int = 1
    is_answered: bool = True
    records: Sequence[Record] | None = None
    closes: Sequence[CacheEntry] = ()

    # Written by attempts.py. The number of tokens of the cache before the append, and how many tokens are
    # prompt after it.
    base: int = 0
    prompt_len: int = 0
    # The number of the temporary copy on which a repeated append is computed, so that it changes nothing.
    copy_number: int | None = None
    # The forward that a worker computes (0: none). Its tokens are those of the request, or in a replay those
    # that the worker does not have, from `position` on. It fails unless it begins within `timeout_s`.
    op_id: int = 0
    token_ids: Sequence[int] = ()
    position: int = 0
    timeout_s: float = 0.0
    # Its pages in the worker's `pages_queued`.
    pages: int = 0
    # As reported by the last worker that had too few pages.
    pages_needed: int = 0
    pages_available: int = 0
    # Failed attempts so far.
    failures: int = 0
    # Tokens that were computed again because the worker did not have their KV.
    replayed_tokens: int = 0
    # The outcome of its attempts: the answer of the worker, or the error for the caller.
    done: ForwardDone | None = None
    error: QuireError | None = None

    # Written by parked.py. What it waits for while it is parked.
    need: Need | None = None
    # The older operation for which the KV of its cache was dropped, until it begins again.
    preempted_for: Operation | None = None
    # The first segment of the cache that it replays. Caches that share it wait for its pages.
    first_segment: Segment | None = None
    # Workers died while they computed this cache. Other such caches wait until it ends.
    is_suspect: bool = False

    # Written by append.py: the weights that computed it.
    weights: int = 0

    # Written by admission.py: the tokens and caches that are reserved for it.
    tokens: int = 0
    caches: int = 0

    def is_late(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s > self.deadline_s - _CLOCK_TOLERANCE_S


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cache: its durable `state`, and fields that are lost in a restart."""

    # Names the cache in commands and records.
    number: int
    # For other tenants the cache does not exist.
    tenant: Tenant
    # The cache of a scoring: removed after its only append.
    ephemeral: bool

    # Written by append.py. The ledger's state. Until the creation is durable: a provisional state, and the
    # record of the creation.
    state: CacheState
    creation: CacheCreated | None = None
    # The answer to the last append, kept for a repetition, and the options of that append.
    answer: ForwardDone | None = None
    answer_options: bytes = b""

    # Written by queues.py, in `touch`: the end of its lease, and when it was used last.
    expires_at_s: float = 0.0
    used_s: float = 0.0

    # Written by placement.py, and `kv_len` by attempts.py too. The worker that has the KV of its first
    # `kv_len` tokens, if any. `ALL_KV`: of all its tokens, including those that the worker appends later.
    worker: WorkerView | None = None
    kv_len: int = 0
    # Whether a command about it was sent to that worker.
    was_sent: bool = False
    # When it was last placed. -inf: not since the gateway started.
    placed_s: float = -math.inf
    # Grows with each placement.
    ownership: int = 0
    # How many of its first tokens were never truncated since the gateway started.
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

    # Written by admission.py: how many of its tokens are counted for the tenant.
    counted_tokens: int = 0

    @property
    def length(self) -> int:
        return self.state.tokens.length

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.waiting)

    @property
    def is_committing(self) -> bool:
        """Whether the journal is writing records that change it."""
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

    @property
    def is_ending(self) -> bool:
        """Whether it is being released, or a release waits for the operations ahead of it."""
        return self.closing or any(isinstance(one.request, Release) for one in self.operations())


@dataclass(slots=True, eq=False)
class WorkerView:
    """A ready worker."""

    worker_id: str
    epoch: int
    page_tokens: int
    pages_total: int
    # The longest sequence: limited by the context of the model, or by the number of pages.
    capacity_tokens: int
    # Free or cached pages, as last reported.
    pages_available: int
    # Pages of running attempts, which the report may not count yet. Written by `Attempts`.
    pages_queued: int = 0
    # The caches whose KV it has. Written by `KvPlacement`; their LRU order by `touch` in queues.py.
    held: OrderedDict[CacheEntry, None] = field(default_factory=OrderedDict)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # It is silent: it gets no new sequences while there is another worker.
    suspect: bool = False
    # It will be replaced: it gets no new attempts.
    draining: bool = False
    # The number of the weights that it has loaded.
    weights: int = 0
    # False once this incarnation is lost. Written by `Workers`.
    is_ready: bool = False

    @property
    def headroom(self) -> int:
        """Pages available to a new sequence."""
        return self.pages_available - self.pages_queued

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class RequestHandler(Generic[Req]):
    """Handles one type of request. It decides; the queues carry out."""

    # Admitted whatever the load is: it frees a cache or keeps one alive.
    is_always_admitted = False
    # Its records may release caches.
    releases = False
    # Refused if the weights of its cache are not served.
    needs_weights = True
    # `answer_at_once` may return an answer.
    may_answer_at_once = False

    def answer_at_once(self, request: Req, tenant: Tenant) -> Result | None:
        """The answer to a request whose cache does not exist, if it can be answered nevertheless."""
        return None

    def entries(self, request: Req, tenant: Tenant) -> tuple[Sequence[CacheEntry | None], int]:
        """The caches of a request, and about how many bytes the journal needs for it.

        None in the place of each cache that does not exist. 0 bytes: the journal does not grow.
        """
        raise NotImplementedError

    def begin(self, operations: Sequence[Operation]) -> list[tuple[Operation, Change]]:
        """Begins operations whose turn has come. Returns those that no worker computes, with the result.

        The result is an answer, an error, or the records of what the operation changes.
        """
        raise NotImplementedError

    def computed(self, operations: Sequence[Operation]) -> list[Change]:
        """Workers have computed these (see `done`). Returns an answer, an error or records for each."""
        raise NotImplementedError

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        """The records of these were applied to the ledger. Returns their answers."""
        raise NotImplementedError

    def write_failed(self, operation: Operation, request: Req) -> None:
        """Undoes the operation after its records could not be written."""

    def cache_released(self, operation: Operation, request: Req, entry: CacheEntry) -> Result | QuireError:
        """The answer if a cache was released before the turn of the operation came."""
        return CacheNotFound().with_index(operation.entries.index(entry), len(operation.entries))
