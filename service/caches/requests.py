"""What callers ask of the caches, and what they get: plain data, without protobuf.

Output options and workers' answers pass through as opaque values: the state machine compares and stores them,
and never looks inside.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from service.caches.plain import plain


class Kind(enum.Enum):
    """What an append is to its caller."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    VERIFY = enum.auto()
    SCORE = enum.auto()


class Priority(enum.IntEnum):
    """Who goes first. One counts as ahead of those below."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@plain
class Append:
    """Append tokens to a cache, or to a new one if `cache_id` is empty; the one data operation."""

    kind: Kind
    cache_id: str
    token_ids: Sequence[int]
    position: int | None = None
    # How many of the last tokens have an output.
    rows: int = 1
    # Opaque. Equal options ask for the same output.
    output: object = None
    # Opaque. 0: all tokens are kept; else the worker says how many.
    accept: int = 0
    lease_s: float | None = None
    # Key under which a repeated creation is recognised. Empty: none.
    request_id: str = ""
    # Keeps the prefixes of a new cache apart from those of the same tenant under another salt.
    cache_salt: str = ""
    # What is left of the caller's deadline. None: there is none.
    timeout_s: float | None = None
    priority: Priority = Priority.NORMAL
    # At most about how large its answer is.
    answer_bytes: int = 0
    # What a worker holds for it beyond what was sent: masks, and the row that samples are drawn from.
    worker_bytes: int = 0
    # Whether the answer holds rows of logits or hidden states, which a repetition computes again.
    has_logits: bool = False
    # Whether the answer, or what it was asked for with, is too large to be kept for a repetition otherwise.
    is_large: bool = False
    # For which weights it was checked: with others its tokens mean something else. None: for those there are.
    weights: int | None = None
    # The chosen token is expected to be appended next, with the same output.
    run_ahead: bool = False
    # How many of the last tokens are answered with their log-probabilities.
    scored: int = 0
    # How single tokens' outputs differ. Opaque. Equal ones ask for the same.
    choices: object = None
    # One more token is drawn for each behind the last token.
    sample_seeds: Sequence[int] = ()
    # The tokens are a tree, of which one path is kept: of each but the first the index of its parent.
    parents: Sequence[int] = ()

    @property
    def keeps_answer(self) -> bool:
        """Whether the answer is kept for a repetition, rather than computed again."""
        return not (self.has_logits or self.is_large)

    @property
    def is_scoring(self) -> bool:
        """Whether the append keeps no cache."""
        return self.kind is Kind.SCORE


@plain
class Source:
    """A cache that a fork makes `count` copies of."""

    cache_id: str
    count: int
    # The length it is believed to have. None: whatever it has.
    position: int | None = None


@plain
class Fork:
    """Make copies of some caches, then release others: all of it, or nothing."""

    # At least one; each cache once.
    sources: Sequence[Source]
    release: Sequence[str] = ()
    # Key under which a repetition is recognised. Empty: none.
    request_id: str = ""

    @classmethod
    def of(cls, cache_id: str, count: int, release: Sequence[str] = (), request_id: str = "") -> Fork:
        """A fork of one cache."""
        return cls((Source(cache_id, count),), release, request_id)

    @property
    def count(self) -> int:
        """How many copies are made in all."""
        return sum(source.count for source in self.sources)


@plain
class Truncate:
    """Keep the first `new_len` tokens of a cache."""

    cache_id: str
    new_len: int
    # The length it is believed to have. None: whatever it has.
    position: int | None = None


@plain
class Release:
    """Forget a cache, after what was asked of it before."""

    cache_id: str


@plain
class Renew:
    """Start a cache's lease anew, of `lease_s` if given, after what was asked of it before."""

    cache_id: str
    lease_s: float | None = None


@plain
class Restore:
    """Bring a cache's KV to a worker, where it is not on one. Asked by nobody: what a loss leaves to do."""

    cache_id: str


Request = Append | Fork | Truncate | Release | Renew | Restore


@plain
class Handle:
    """What a caller learns of a cache. `expires_at_s` is on the state machine's clock; inf: never.

    `epoch` grows whenever the KV is placed anew. `worker_id` is empty while it is nowhere.
    """

    cache_id: str
    seq_len: int
    epoch: int
    worker_id: str
    expires_at_s: float


@plain
class Appended:
    """An append that was applied, or the answer to its repetition.

    `handle` is None where no cache is kept. `kept` counts the tokens that the cache kept, which is not what
    `answer` says of itself where that was computed again.
    """

    handle: Handle | None
    answer: object
    kept: int
    # Computed once more, because the KV was not there.
    replayed_tokens: int = 0
    # Of a tree: the indexes of the tokens that the cache kept.
    path: Sequence[int] = ()


@plain
class Handles:
    """The caches that a fork, a truncation or a renewal leaves its caller with."""

    handles: Sequence[Handle]


@plain
class Released:
    """Whether there was a cache to release."""

    released: bool


Result = Appended | Handles | Released


@plain
class Remembered:
    """A cache that was made under a request id, as it is now. `token_ids`: all of them."""

    cache_id: str
    token_ids: Sequence[int]
    weights: int
