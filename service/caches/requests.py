"""Requests to the state machine and their results: plain data, without protobuf.

The options of a request and the answers of workers are opaque: the state machine compares and stores them,
but does not read them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from service.caches.frozen_struct import frozen_struct


class AppendKind(enum.IntEnum):
    """Which call an append comes from."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    VERIFY = enum.auto()
    SCORE = enum.auto()


class Priority(enum.IntEnum):
    """The priority of an append."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class PreviousCaches(enum.Enum):
    """What becomes of caches when weights are replaced; as in LoadWeightsRequest."""

    END = enum.auto()
    RECOMPUTE = enum.auto()
    KEEP_KV = enum.auto()


# For code that runs for each token: looking up a member of an enum takes 0.2 us on Python 3.11.
PREFILL, DECODE, VERIFY = AppendKind.PREFILL, AppendKind.DECODE, AppendKind.VERIFY
NORMAL, HIGH = Priority.NORMAL, Priority.HIGH


@frozen_struct
class Append:
    """Append tokens to a cache, or to a new one if `cache_id` is empty."""

    kind: AppendKind
    cache_id: str
    token_ids: Sequence[int]
    position: int | None = None
    # What to compute and return. Opaque; equal options give equal answers.
    options: bytes = b""
    # The time until the caller's deadline. None: no deadline.
    timeout_s: float | None = None
    priority: Priority = NORMAL
    # About the largest size that its answer can have.
    answer_bytes: int = 0
    # For a new cache: the weights against which the request was checked. None: any.
    weights: int | None = None
    # Also in the options. 0: all tokens are kept. Otherwise the worker decides how many.
    accept: int = 0
    # Also in the options. If set, the tokens are a tree of which one path is kept; for each token except the
    # first, the index of its parent.
    parents: Sequence[int] = ()
    # Its cost beyond the tokens, in rows of logits.
    rows: int = 1
    lease_s: float | None = None
    # To recognise a repeated creation. Empty: not recognised.
    request_id: str = ""
    # A new cache shares prefixes only with caches of the same tenant and salt.
    cache_salt: str = ""
    # Memory that it takes in the worker beside the request: masks, and the row that samples are drawn from.
    worker_bytes: int = 0
    # Whether the answer is kept for a repetition. If it is large, or has rows of logits or hidden states, it
    # is computed again.
    keeps_answer: bool = True
    # The adapter of a new cache. 0: none.
    adapter: int = 0
    # The caller will probably append the chosen token this many times in a row, with the same output. A
    # decode may append all but the last of these tokens itself: see `ForwardDone`. Less than 256.
    prelaunch: int = 0

    @property
    def is_scoring(self) -> bool:
        return self.kind is AppendKind.SCORE

    @property
    def most_appended(self) -> int:
        """How many chosen tokens may be appended after its own token."""
        return self.prelaunch - 1 if self.prelaunch > 1 and self.kind is AppendKind.DECODE else 0


@frozen_struct
class Source:
    """A cache that a fork makes `count` copies of."""

    cache_id: str
    count: int
    # The expected length. None: any.
    position: int | None = None


@frozen_struct
class Fork:
    """Make copies of some caches and release others, atomically."""

    # At least one. Each cache occurs once.
    sources: Sequence[Source]
    release: Sequence[str] = ()
    # To recognise a repetition. Empty: not recognised.
    request_id: str = ""

    @classmethod
    def of(cls, cache_id: str, count: int, release: Sequence[str] = (), request_id: str = "") -> Fork:
        return cls((Source(cache_id, count),), release, request_id)

    @property
    def count(self) -> int:
        return sum(source.count for source in self.sources)


@frozen_struct
class Truncate:
    """Keep the first `new_len` tokens of a cache."""

    cache_id: str
    new_len: int
    # The expected length. None: any.
    position: int | None = None


@frozen_struct
class Release:
    """Release a cache after the earlier requests for it."""

    cache_id: str


@frozen_struct
class Renew:
    """Restart the lease of a cache after the earlier requests for it. None: of the same length."""

    cache_id: str
    lease_s: float | None = None


Request = Append | Fork | Truncate | Release | Renew


@frozen_struct
class Handle:
    """A cache as its caller sees it. `expires_at_s` is on the state machine's clock; inf: never.

    `epoch` grows with each placement of the KV. `worker_id` is empty while the cache is not assigned.
    """

    cache_id: str
    seq_len: int
    epoch: int
    worker_id: str
    expires_at_s: float
    # The weights that computed the result, and the cache's adapter (0: none).
    weights: int
    adapter: int


@frozen_struct
class Appended(Handle):
    """The result of an append, or of its repetition.

    `cache_id` is empty if no cache is kept. `kept` is the number of tokens that the cache kept. If a
    repetition is computed again, its `answer` can contain a different number.
    """

    answer: object
    kept: int
    # Tokens computed again because the worker did not have their KV.
    replayed_tokens: int = 0
    # For a tree: the indexes of the accepted path.
    path: Sequence[int] = ()


@frozen_struct
class Handles:
    """The result of a fork, a truncation or a renewal."""

    handles: Sequence[Handle]


@frozen_struct
class Released:
    """The result of a release: whether the cache existed."""

    released: bool


Result = Appended | Handles | Released


def cache_ids(result: object) -> Sequence[str]:
    """The ids of the caches in a result."""
    if isinstance(result, Handles):
        return [handle.cache_id for handle in result.handles]
    return (result.cache_id,) if isinstance(result, Appended) and result.cache_id else ()


def undelivered(request: Request, result: object) -> Sequence[str]:
    """The caches to release if a result is not delivered, since nobody else knows their ids.

    Caches that were created with a request id can be looked up, and stay.
    """
    match request:
        case Append(cache_id="", request_id="") | Fork(request_id=""):
            return cache_ids(result)
    return ()


@frozen_struct
class CacheSnapshot:
    """A copy of the current state of a cache, with all its tokens."""

    cache_id: str
    token_ids: Sequence[int]
    weights: int
    adapter: int
    salt: bytes
