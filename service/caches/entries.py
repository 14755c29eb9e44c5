"""What the table keeps: a CacheEntry a cache, an Operation a request, an Attempt for each try of it."""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.caches.admission import Ahead
from service.caches.chunks import Chunk
from service.caches.effects import ForwardDone
from service.caches.ledger import CacheState, fingerprint
from service.caches.placement import WorkerView
from service.caches.records import LastAppend, Record
from service.caches.requests import Append, Handle, Kind, Request
from service.caches.tenants import Tenant

# By so much a caller's clock may be before ours when its deadline ends a call.
_CLOCKS_S = 0.02


class Phase(enum.Enum):
    """How far an operation has come."""

    # Others are before it, on its cache or on one of those that it forks.
    WAITING = enum.auto()
    # Its turn has come, and it cannot be computed yet: `need` says why.
    PARKED = enum.auto()
    # A worker computes what the cache has already, and that worker has not.
    REPLAYING = enum.auto()
    # A worker computes what was asked for.
    COMPUTING = enum.auto()
    # Its records are with the journal. It can no longer be taken back.
    COMMITTING = enum.auto()


class Need(enum.Enum):
    """What a parked operation waits for."""

    WORKER = enum.auto()
    # For pages of the worker that its cache is on.
    ROOM = enum.auto()
    # Workers have died under it: it has to be the only such one on a worker, so that it is known who did it.
    SOLITUDE = enum.auto()
    # A cache that shares its first tokens is being replayed, whose pages it can use then.
    RELATIVE = enum.auto()
    # So many tokens were handed out for replays a moment ago that others have to have their turn.
    PACE = enum.auto()


@dataclass(slots=True)
class StoredAnswer:
    """The answer of a cache's last append, kept to answer its repetition."""

    rows: int
    scored: int
    choices: object
    sample_seeds: Sequence[int]
    output: object
    answer: object

    def answers(self, append: Append) -> bool:
        """Whether the repetition asks for the very same output."""
        return (append.rows, append.scored, append.choices, append.sample_seeds, append.output) == (
            self.rows,
            self.scored,
            self.choices,
            self.sample_seeds,
            self.output,
        )


@dataclass(slots=True)
class Attempt:
    """One forward that a worker was asked for on behalf of an operation."""

    op_id: int
    worker: WorkerView
    # What it is to its worker, and what was ahead of it.
    ahead: Ahead
    # Counted in the worker's pages_queued.
    pages: int
    tokens: int
    # Of the cache that it replays: others that begin with it wait until its pages are there.
    first_chunk: Chunk | None = None
    # Workers have died under its cache: others of that kind wait for its end.
    is_suspect: bool = False


@dataclass(slots=True, eq=False)
class Operation:
    """A request on its way."""

    ticket: int
    request: Request
    # The cache it is about; of a fork, the first of those it copies.
    entry: CacheEntry
    # Whose it is; workers let callers take turns. Means nothing to the state machine.
    caller: int
    submitted_s: float = 0.0
    # False: its caller has gone, or never was.
    is_answered: bool = True
    # Nobody asked for it, so it counts as nobody's.
    is_ours: bool = False
    phase: Phase = Phase.WAITING
    need: Need | None = None
    # While it needs room: pages on that worker, and how many there were.
    pages_needed: int = 0
    pages_available: int = 0
    # Tokens the cache had when the append began.
    base: int = 0
    # The number of a temporary copy on which the last answer is computed again; applies nothing.
    copy_number: int | None = None
    attempt: Attempt | None = None
    # Attempts that came to nothing through no fault of the caller's.
    failures: int = 0
    # Computed again for it, because the KV was not there.
    replayed_tokens: int = 0
    # When its caller wants it at the latest. None: there is no such time.
    deadline_s: float | None = None
    # With the journal, and what the worker said of what they say.
    records: Sequence[Record] = ()
    done: ForwardDone | None = None
    # Counted as what the journal will take for it, until that is there or will not be.
    size_bytes: int = 0
    # Counted in the tenant's tokens until they are in the cache.
    tokens: int = 0
    # Caches that it is about to make, counted as if they were there.
    caches: int = 0
    # Of a fork of several caches, the others. It begins once its turn has come on all of them.
    others: Sequence[CacheEntry] = ()
    # On how many of its caches that has come.
    turns: int = 0

    @property
    def entries(self) -> Sequence[CacheEntry]:
        """The caches in whose queues it is."""
        return (self.entry, *self.others) if self.others else (self.entry,)

    @property
    def has_turn(self) -> bool:
        """Whether its turn has come on all of its caches."""
        return self.turns > len(self.others)

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline is there."""
        return self.deadline_s is not None and now_s > self.deadline_s - _CLOCKS_S

    @property
    def queue(self) -> int:
        """Whose turn it takes: its caller's, or one of its own."""
        return self.caller or -self.ticket


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cache: what its records leave (`state`), and what is true of it only while the gateway runs."""

    # Of the ledger; until it is created there, a draft of it.
    state: CacheState
    # Whose it is: to others it does not exist.
    tenant: Tenant
    expires_at_s: float
    # Where its KV is, and how many of its tokens are there at least. None: nowhere.
    home: WorkerView | None = None
    kv_len: int = 0
    # Whether that worker has ever been told of it.
    was_sent: bool = False
    placed_s: float = 0.0
    # So many of its first tokens have never been others since the gateway began.
    unchanged_len: int = sys.maxsize
    used_s: float = 0.0
    # Grows whenever its KV is placed anew.
    ownership: int = 0
    # For workers that died while they computed it: see `blame.py`.
    strikes: int = 0
    named: int = 0
    quarantined: bool = False
    # False until what creates it was applied: no caller knows the id yet.
    visible: bool = False
    # Grows in the order in which caches became visible.
    order: int = 0
    # Keeps no cache: gone after its one append.
    ephemeral: bool = False
    # Its release is with the journal, on behalf of a fork: nothing begins on it.
    closing: bool = False
    answer: StoredAnswer | None = None
    running: Operation | None = None
    waiting: deque[Operation] = field(default_factory=deque)
    # Of its tokens, in the tenant's.
    _counted: int = 0

    @property
    def number(self) -> int:
        """Its name towards workers, and in records."""
        return self.state.number

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.state.tokens.length

    @property
    def last(self) -> LastAppend | None:
        """The append that made it as long as it is."""
        return self.state.last

    @property
    def busy(self) -> bool:
        """Whether an operation runs or waits."""
        return self.running is not None or bool(self.waiting)

    @property
    def is_committing(self) -> bool:
        """Whether what changes it is with the journal."""
        return self.running is not None and self.running.phase is Phase.COMMITTING

    @property
    def handle(self) -> Handle:
        """What a caller learns of the cache."""
        worker_id = "" if self.home is None else self.home.worker_id
        return Handle(self.state.cache_id, self.length, self.ownership, worker_id, self.expires_at_s)

    def count(self, length: int | None = None) -> None:
        """Brings the tenant's tokens up to date with its length, or with the given one."""
        now = self.length if length is None else length
        self.tenant.tokens += now - self._counted
        self._counted = now

    def operations(self) -> Iterator[Operation]:
        """The running one, then those that wait, in order."""
        if self.running is not None:
            yield self.running
        yield from self.waiting

    def prompt_len_after(self, append: Append) -> int:
        """The prompt boundary with `append` applied: a prefill makes everything so far prompt."""
        if append.kind is Kind.PREFILL:
            return self.length + len(append.token_ids)
        return self.state.prompt_len


def is_repeated(last: LastAppend, append: Append, position: int) -> bool:
    """Whether `append` at `position` would do what the last one has done already."""
    return (
        position == last.base
        and append.accept == last.accept
        and fingerprint(append.token_ids, append.parents) == last.asked
    )
