"""The records that the table keeps: one CacheEntry a cache, one Operation a request on its way."""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.caches.admission import Ahead
from service.caches.placement import WorkerView
from service.caches.requests import Append, Handle, Kind, Request
from service.caches.tenants import Tenant

_SHORT_TOKENS = 32
# By so much a caller's clock may be before ours when its deadline ends a call.
_CLOCKS_S = 0.02


class KvState(enum.Enum):
    """Where a cache's KV is. A closed cache is in no table any more."""

    RESIDENT = enum.auto()
    LOST = enum.auto()


@dataclass(slots=True)
class AppliedAppend:
    """The last append of a cache, kept to recognise and answer its repetition."""

    base: int
    tokens: object  # a fingerprint of the tokens
    kept: int
    rows: int
    accept: int
    output: object
    # None: the answer or its options are too large to keep, and it would be computed again.
    answer: object | None

    @classmethod
    def of(cls, append: Append, base: int, kept: int, answer: object) -> AppliedAppend:
        """Remembers an applied append. Keeps neither its tokens nor anything large alive."""
        return cls(
            base=base,
            tokens=fingerprint(append.token_ids),
            kept=kept,
            rows=append.rows,
            accept=append.accept,
            output=append.output if append.keeps_answer else None,
            answer=answer if append.keeps_answer else None,
        )

    def is_repeated_by(self, append: Append, position: int) -> bool:
        """Whether `append` at `position` would do what was done already."""
        return (
            position == self.base
            and append.accept == self.accept
            and fingerprint(append.token_ids) == self.tokens
        )

    def answers(self, append: Append) -> object | None:
        """The stored answer, if the repetition asks for the very same output."""
        return self.answer if append.rows == self.rows and append.output == self.output else None


@dataclass(slots=True)
class Operation:
    """A request on its way. The ticket is also the op id of the command that answers it."""

    ticket: int
    request: Request
    entry: CacheEntry
    # Whose it is; workers let callers take turns. Means nothing to the state machine.
    caller: int
    submitted_s: float = 0.0
    # False: its caller has gone.
    is_answered: bool = True
    # Tokens the cache had when the append began.
    base: int = 0
    # The number of a temporary copy on which the last answer is computed again; applies nothing.
    copy_number: int | None = None
    # What a fork is making.
    children: list[CacheEntry] = field(default_factory=list)
    # When its caller wants it at the latest. None: there is no such time.
    deadline_s: float | None = None
    # What it is to its worker, and what was ahead of it, once it has been sent.
    ahead: Ahead | None = None
    # Counted in the worker's pages_queued.
    pages: int = 0
    # Counted as what the journal will take for it, until that is there or will not be.
    size_bytes: int = 0
    # Counted in the tenant's tokens until they are in the cache.
    tokens: int = 0

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline is there."""
        return self.deadline_s is not None and now_s > self.deadline_s - _CLOCKS_S

    @property
    def queue(self) -> int:
        """Whose turn it takes: its caller's, or one of its own."""
        return self.caller or -self.ticket


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cache. `number` is its name towards the worker."""

    cache_id: str
    number: int
    worker: WorkerView
    # Whose it is: to others it does not exist.
    tenant: Tenant
    salt: bytes
    seed: int
    lease_s: float
    expires_at_s: float
    state: KvState = KvState.RESIDENT
    length: int = 0
    # Tokens before this index are prompt to the frequency and presence penalties.
    prompt_len: int = 0
    # False until what creates it was applied: no caller knows the id yet.
    visible: bool = False
    # Grows in the order in which caches became visible.
    order: int = 0
    # Keeps no cache: gone after its one append.
    ephemeral: bool = False
    # Key of the creation, to recognise its repetition.
    request_id: str = ""
    last_append: AppliedAppend | None = None
    running: Operation | None = None
    waiting: deque[Operation] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether an operation runs or waits."""
        return self.running is not None or bool(self.waiting)

    @property
    def handle(self) -> Handle:
        """What a caller learns of the cache."""
        worker = self.worker
        return Handle(self.cache_id, self.length, worker.epoch, worker.worker_id, self.expires_at_s)

    def resize(self, length: int) -> None:
        """Sets the length, which the tenant's tokens follow."""
        self.tenant.tokens += length - self.length
        self.length = length

    def operations(self) -> Iterator[Operation]:
        """The running one, then those that wait, in order."""
        if self.running is not None:
            yield self.running
        yield from self.waiting

    def prompt_len_after(self, append: Append) -> int:
        """The prompt boundary with `append` applied: a prefill makes everything so far prompt."""
        return self.length + len(append.token_ids) if append.kind is Kind.PREFILL else self.prompt_len


def fingerprint(token_ids: Sequence[int]) -> object:
    """Equal for equal tokens only, and small: long prompts are not kept alive by it."""
    if len(token_ids) <= _SHORT_TOKENS:
        return tuple(token_ids)
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
