"""The records that `sequences.py` keeps: one CacheEntry a cache, one Operation a request on its way."""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2, worker_pb2

from service.caches.placement import WorkerView
from service.caches.requests import Append, Kind, Request, Rows

_SHORT_TOKENS = 32


class State(enum.Enum):
    """Where a cache's KV is. A closed cache is in no table any more."""

    RESIDENT = enum.auto()
    LOST = enum.auto()


@dataclass(slots=True)
class AppliedAppend:
    """The last append of a cache, kept to recognise and answer its repetition."""

    base: int
    tokens: object  # a fingerprint of the tokens
    kept: int
    rows: Rows
    accept: int
    output: types_pb2.OutputOptions | None
    # None: the answer held logits, is too large to keep, and would be computed again.
    done: worker_pb2.ForwardDone | None

    @classmethod
    def of(cls, append: Append, base: int, done: worker_pb2.ForwardDone) -> AppliedAppend:
        """Remembers an applied append. Keeps neither its tokens nor returned logits alive."""
        large = append.output is not None and append.output.logits
        return cls(
            base=base,
            tokens=fingerprint(append.token_ids),
            kept=done.kept,
            rows=append.rows,
            accept=append.accept,
            output=append.output,
            done=None if large else done,
        )

    def is_repeated_by(self, append: Append, position: int) -> bool:
        """Whether `append` at `position` would do what was done already."""
        return (
            position == self.base
            and append.accept == self.accept
            and fingerprint(append.token_ids) == self.tokens
        )

    def answers(self, append: Append) -> worker_pb2.ForwardDone | None:
        """The stored answer, if the repetition asks for the very same output."""
        return self.done if append.rows == self.rows and append.output == self.output else None


@dataclass(slots=True)
class Operation:
    """A request on its way. The ticket is also the op id of the command that answers it."""

    ticket: int
    request: Request
    entry: CacheEntry
    # Whose it is, see `ForwardCommand.caller`. Means nothing to the state machine.
    caller: int
    # Tokens the cache had when the append began.
    base: int = 0
    # The number of a temporary copy on which the last append's answer is computed again; applies nothing.
    copy_number: int | None = None
    # What a fork is making.
    children: list[CacheEntry] = field(default_factory=list)
    # Counted in the worker's pages_queued.
    pages: int = 0


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One cache. `number` is its name towards the worker."""

    cache_id: str
    number: int
    worker: WorkerView
    seed: int
    lease_s: float
    expires_at_s: float
    state: State = State.RESIDENT
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

    def prompt_len_after(self, append: Append) -> int:
        """The prompt boundary with `append` applied: a prefill makes everything so far prompt."""
        return self.length + len(append.token_ids) if append.kind is Kind.PREFILL else self.prompt_len


def fingerprint(token_ids: Sequence[int]) -> object:
    """Equal for equal tokens only, and small: long prompts are not kept alive by it."""
    if len(token_ids) <= _SHORT_TOKENS:
        return tuple(token_ids)
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()
