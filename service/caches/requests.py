"""What flows into and out of the state machine in `sequences.py`: requests, results, and effects.

Plain data. Output options and worker answers pass through as opaque protobuf messages: the state machine
compares and stores them, and never looks inside.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2, worker_pb2

from service.errors import QuireError
from service.journal.base import Record


class Rows(enum.IntEnum):
    """Which positions of a append have an output."""

    NONE = worker_pb2.ROW_SELECTION_UNSPECIFIED
    LAST = worker_pb2.ROW_SELECTION_LAST
    ALL = worker_pb2.ROW_SELECTION_ALL


class Kind(enum.IntEnum):
    """What a append is to its caller."""

    PREFILL = worker_pb2.OPERATION_KIND_PREFILL
    DECODE = worker_pb2.OPERATION_KIND_DECODE
    VERIFY = worker_pb2.OPERATION_KIND_VERIFY
    SCORE = worker_pb2.OPERATION_KIND_SCORE


@dataclass(frozen=True, slots=True)
class Append:
    """Append tokens to a cache, or to a new one if `cache_id` is empty; the one data operation."""

    kind: Kind
    cache_id: str
    token_ids: Sequence[int]
    position: int | None = None
    rows: Rows = Rows.LAST
    output: types_pb2.OutputOptions | None = None
    accept: int = types_pb2.VERIFY_ACCEPT_UNSPECIFIED
    lease_s: float | None = None
    # Key under which a repeated creation is recognised. Empty: none.
    request_id: str = ""
    # What is left of the caller's deadline. None: there is none.
    timeout_s: float | None = None

    @property
    def num_rows(self) -> int:
        """Positions that have an output."""
        return {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: len(self.token_ids)}[self.rows]

    @property
    def is_scoring(self) -> bool:
        """Whether the append keeps no cache."""
        return self.kind is Kind.SCORE


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Make `count` copies of a cache, then release others."""

    cache_id: str
    count: int
    release: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TruncateRequest:
    """Keep the first `new_len` tokens of a cache."""

    cache_id: str
    new_len: int


Request = Append | ForkRequest | TruncateRequest


@dataclass(frozen=True, slots=True)
class Handle:
    """What a caller learns of a cache. `expires_at_s` is on the state machine's clock; inf: never."""

    cache_id: str
    seq_len: int
    epoch: int
    worker_id: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class AppendResult:
    """An applied append, or the answer to its repetition. `handle` is None for a append that keeps no cache.

    `kept` counts the tokens of the append that the cache kept; `done.kept` is the worker's own view, which
    differs where the answer was computed again.
    """

    handle: Handle | None
    done: worker_pb2.ForwardDone
    kept: int


@dataclass(frozen=True, slots=True)
class HandlesResult:
    """The caches a truncation or fork leaves its caller with."""

    handles: Sequence[Handle] = field(default_factory=tuple)


Result = AppendResult | HandlesResult


# Effects: what the state machine wants done, in this order.


@dataclass(frozen=True, slots=True)
class Send:
    """A command for a worker's stream."""

    worker_id: str
    epoch: int
    command: worker_pb2.WorkerCommand


@dataclass(frozen=True, slots=True)
class Write:
    """A record for the journal. The Reply that follows it may be sent only once it is written."""

    record: Record


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of an operation. Sent once for each ticket that was not cancelled."""

    ticket: int
    outcome: Result | QuireError


Effect = Send | Write | Reply
