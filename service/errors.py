"""Every failure a client can see: one exception tree, and the gRPC code of each.

    QuireError
    ├── InvalidArgument        INVALID_ARGUMENT     reason and field given by the check that failed
    ├── CacheNotFound          NOT_FOUND            CACHE_NOT_FOUND
    ├── RuntimeNotFound        NOT_FOUND            RUNTIME_NOT_FOUND
    ├── PositionMismatch       FAILED_PRECONDITION  POSITION_MISMATCH
    ├── Unsupported            FAILED_PRECONDITION  UNSUPPORTED_BY_EXECUTOR
    ├── NoTokenizer            FAILED_PRECONDITION  NO_TOKENIZER
    ├── WeightsChanged         FAILED_PRECONDITION  WEIGHTS_CHANGED
    ├── LoadFailed             FAILED_PRECONDITION  LOAD_FAILED
    ├── BadRuntimes            FAILED_PRECONDITION  BAD_RUNTIMES
    ├── ExecutionLost          FAILED_PRECONDITION  EXECUTION_LOST
    ├── SequenceTooLong        OUT_OF_RANGE         SEQUENCE_TOO_LONG
    ├── TruncateBeyondEnd      OUT_OF_RANGE         TRUNCATE_BEYOND_END
    ├── KvExhausted            RESOURCE_EXHAUSTED   KV_EXHAUSTED
    ├── QueueFull              RESOURCE_EXHAUSTED   QUEUE_FULL
    ├── TooManyExecutions      RESOURCE_EXHAUSTED   QUEUE_FULL
    ├── Overloaded             RESOURCE_EXHAUSTED   OVERLOADED
    ├── CacheLimit             RESOURCE_EXHAUSTED   CACHE_LIMIT
    ├── JournalFull            RESOURCE_EXHAUSTED   JOURNAL_FULL
    ├── AnswersFull            RESOURCE_EXHAUSTED   ANSWERS_FULL
    ├── ArrivingFull           RESOURCE_EXHAUSTED   ARRIVING_FULL
    ├── SessionLimit           RESOURCE_EXHAUSTED   SESSION_LIMIT
    ├── SlowConsumer           RESOURCE_EXHAUSTED   SLOW_CONSUMER
    ├── QuotaExceeded          RESOURCE_EXHAUSTED   QUOTA
    ├── NoMemory               RESOURCE_EXHAUSTED   NO_MEMORY
    ├── Unauthenticated        UNAUTHENTICATED      reason given by the door
    ├── RoleMissing            PERMISSION_DENIED    ROLE_MISSING
    ├── NoWorker               UNAVAILABLE          NO_WORKER
    ├── Draining               UNAVAILABLE          DRAINING
    ├── WorkerLost             UNAVAILABLE          WORKER_LOST
    ├── JournalUnavailable     UNAVAILABLE          JOURNAL_UNAVAILABLE
    ├── ResumedElsewhere       ABORTED              RESUMED_ELSEWHERE
    ├── Loading                ABORTED              LOADING
    ├── DeadlinePassed         DEADLINE_EXCEEDED    DEADLINE_PASSED
    ├── MessageTimeout         DEADLINE_EXCEEDED    MESSAGE_TIMEOUT
    ├── WorkerFault            INTERNAL             WORKER_FAULT
    ├── SequenceQuarantined    INTERNAL             SEQUENCE_QUARANTINED
    ├── ProviderFailure        by the reason: PROVIDER_CODES
    └── InternalError          INTERNAL             INTERNAL

Messages are written for the caller and hold only what the caller sent or may know. RetryInfo is attached only
where trying again can help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

# What ends a task or the process without anything having failed. Where a call has to be answered, all else is
# caught: a panic of a library in Rust is a BaseException, and no Exception.
NOT_FAILURES = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class QuireError(Exception):
    """A failure with a stable reason and the name of its gRPC code.

    `metadata` holds numbers a program can act on, as strings.
    """

    code: str = "INTERNAL"
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def of_one(self, index: int, count: int) -> Self:
        """The failure of one of `count` caches that a call is about, which says so if there are several."""
        if count > 1:
            self.metadata["index"] = str(index)
        return self

    def untraced(self) -> Self:
        """The failure without the way it took, for one that is kept or answered.

        The frames of a traceback hold what was refused, and often the error itself: a cycle. A refused
        request would stay in memory until the next garbage collection, which counts objects, not bytes.
        """
        self.__traceback__ = None
        return self


class InvalidArgument(QuireError):
    """The request itself is wrong. `field` is its path, such as `items[3].token_id`."""

    code = "INVALID_ARGUMENT"

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field

    def below(self, prefix: str) -> InvalidArgument:
        """The same failure seen from the message that contains this one."""
        return InvalidArgument(self.reason, f"{prefix}.{self.field}", self.message)


def too_many(field: str, limit: int) -> InvalidArgument:
    """More calls in a message, items in a batch or fields in either than the server takes at a time."""
    return InvalidArgument(f"TOO_MANY_{field.upper()}", field, f"at most {limit} {field} are taken at a time")


def too_many_forks(limit: int) -> InvalidArgument:
    """A fork of more caches than a batch has items."""
    return InvalidArgument("TOO_MANY_ITEMS", "forks", f"at most {limit} caches are copied at a time")


class CacheNotFound(QuireError):
    """Never existed, released, expired, or another tenant's."""

    code = "NOT_FOUND"
    reason = "CACHE_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no such cache: it never existed, was released, or its lease ran out")


class RuntimeNotFound(QuireError):
    """The configuration has no runtime of that name."""

    code = "NOT_FOUND"
    reason = "RUNTIME_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("no such runtime: ListRuntimes names those there are")


class PositionMismatch(QuireError):
    """The stated position is neither the length nor the base of an identical last append."""

    code = "FAILED_PRECONDITION"
    reason = "POSITION_MISMATCH"

    def __init__(self, stated: int, actual: int) -> None:
        super().__init__(
            f"position {stated} was stated, the cache has {actual} tokens",
            metadata={"position": str(stated), "seq_len": str(actual)},
        )


class Unsupported(QuireError):
    """The executor in use cannot do it."""

    code = "FAILED_PRECONDITION"
    reason = "UNSUPPORTED_BY_EXECUTOR"


class NoTokenizer(QuireError):
    """Text was sent or wanted, and the model has no tokenizer."""

    code = "FAILED_PRECONDITION"
    reason = "NO_TOKENIZER"

    def __init__(self) -> None:
        super().__init__("the model has no tokenizer: send and ask for tokens")


class WeightsChanged(QuireError):
    """The server has other weights now than those of the cache, or than those the call was checked for."""

    code = "FAILED_PRECONDITION"
    reason = "WEIGHTS_CHANGED"

    def __init__(self, *, can_be_repeated: bool = False) -> None:
        """`can_be_repeated`: the call is about no cache of the weights before."""
        super().__init__(
            "the server serves other weights now: "
            + ("nothing was applied, call again" if can_be_repeated else "this cache can only be released"),
            retry_after_s=0.01 if can_be_repeated else None,
        )


class LoadFailed(QuireError):
    """Other weights could not be loaded. What was served is served on."""

    code = "FAILED_PRECONDITION"
    reason = "LOAD_FAILED"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the weights before are served on")


class BadRuntimes(QuireError):
    """The file of runtimes cannot be used. `why` names the place in it, and none of its contents."""

    code = "FAILED_PRECONDITION"
    reason = "BAD_RUNTIMES"

    def __init__(self, why: str) -> None:
        super().__init__(f"the file of runtimes cannot be used: {why}")


class SequenceTooLong(QuireError):
    """The append would grow the sequence past the model's context or the whole pool: waiting cannot help."""

    code = "OUT_OF_RANGE"
    reason = "SEQUENCE_TOO_LONG"

    def __init__(self, wanted: int, limit: int) -> None:
        super().__init__(
            f"the sequence would have {wanted} tokens, at most {limit} can be held",
            metadata={"wanted_tokens": str(wanted), "kv_capacity_tokens": str(limit)},
        )


class TruncateBeyondEnd(QuireError):
    """A truncation to more tokens than there are."""

    code = "OUT_OF_RANGE"
    reason = "TRUNCATE_BEYOND_END"

    def __init__(self, new_len: int, actual: int) -> None:
        super().__init__(
            f"new_len {new_len} is past the end: the cache has {actual} tokens",
            metadata={"new_len": str(new_len), "seq_len": str(actual)},
        )


class KvExhausted(QuireError):
    """The worker has too few pages, even after giving up all cached ones."""

    code = "RESOURCE_EXHAUSTED"
    reason = "KV_EXHAUSTED"

    def __init__(self, needed: int, available: int) -> None:
        self.pages_needed, self.pages_available = needed, available
        super().__init__(
            f"{needed} KV pages are needed, {available} are available: release or truncate caches",
            metadata={"pages_needed": str(needed), "pages_available": str(available)},
            retry_after_s=0.1,
        )


class QueueFull(QuireError):
    """More operations wait than the server allows."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"{limit} operations are already waiting or running",
            metadata={"limit": str(limit)},
            retry_after_s=retry_after_s,
        )


class TooManyExecutions(QuireError):
    """As many executions are under way as may be, of all or of the tenant."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"

    def __init__(self, limit: int, retry_after_s: float, *, of_tenant: bool = False) -> None:
        super().__init__(
            f"{limit} executions{' of the tenant' if of_tenant else ''} are already under way",
            metadata={"limit": str(limit)},
            retry_after_s=retry_after_s,
        )


class Overloaded(QuireError):
    """What stands ahead of it would take longer than the call may wait, or has."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, expected_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"it would take about {expected_s:.2f} seconds, at its priority it may take {left_s:.2f}",
            metadata={"expected_ms": str(int(expected_s * 1000)), "left_ms": str(int(left_s * 1000))},
            retry_after_s=retry_after_s,
        )


class CacheLimit(QuireError):
    """There are as many caches as the server allows. Leases run out, so trying again can help."""

    code = "RESOURCE_EXHAUSTED"
    reason = "CACHE_LIMIT"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"at most {limit} caches can be held: release some",
            metadata={"limit": str(limit)},
            retry_after_s=1.0,
        )


class JournalFull(QuireError):
    """No more tokens can be remembered until caches are released, or their leases run out."""

    code = "RESOURCE_EXHAUSTED"
    reason = "JOURNAL_FULL"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the tokens of all caches fill {limit_bytes} bytes: release or truncate some",
            metadata={"limit_bytes": str(limit_bytes)},
            retry_after_s=1.0,
        )


class AnswersFull(QuireError):
    """The answers that are under way, or not yet read, leave no room for this one."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ANSWERS_FULL"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"answers of {limit_bytes} bytes are under way or not yet read",
            metadata={"limit_bytes": str(limit_bytes)},
            retry_after_s=0.1,
        )


class ArrivingFull(QuireError):
    """Too many requests are slow to arrive, the newest of which end; or bodies over HTTP take too much."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ARRIVING_FULL"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"requests that are slow to arrive, and those of HTTP, may take {limit_bytes} bytes in all",
            metadata={"limit_bytes": str(limit_bytes)},
            retry_after_s=1.0,
        )


class SessionLimit(QuireError):
    """As many sessions are open as the server allows."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SESSION_LIMIT"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} sessions are open",
            metadata={"limit": str(limit)},
            retry_after_s=1.0,
        )


class SlowConsumer(QuireError):
    """A session's caller does not read its answers."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SLOW_CONSUMER"

    def __init__(self, stalled_s: float) -> None:
        super().__init__(f"no answer was read for {stalled_s:g} seconds; what was not answered is undone")


class QuotaExceeded(QuireError):
    """The tenant holds, or asks for, as much as it may."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUOTA"

    def __init__(self, quota: str, limit: float, retry_after_s: float | None = None) -> None:
        super().__init__(
            f"the tenant's quota {quota} of {limit:g} is used up",
            metadata={"quota": quota, "limit": f"{limit:g}"},
            retry_after_s=retry_after_s,
        )


class NoMemory(QuireError):
    """Other weights do not fit beside those that are served."""

    code = "RESOURCE_EXHAUSTED"
    reason = "NO_MEMORY"

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"the weights need {needed_bytes >> 20} MiB beside those that are served, and"
            f" {available_bytes >> 20} MiB are free",
            metadata={"needed_bytes": str(needed_bytes), "available_bytes": str(available_bytes)},
        )


class Unauthenticated(QuireError):
    """Nobody knows who calls. Says nothing of which tokens exist."""

    code = "UNAUTHENTICATED"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RoleMissing(QuireError):
    """The caller is known and may not make this call."""

    code = "PERMISSION_DENIED"
    reason = "ROLE_MISSING"

    def __init__(self, role: str) -> None:
        super().__init__(f"this call needs the role {role}", metadata={"role": role})


class NoWorker(QuireError):
    """No worker is ready."""

    code = "UNAVAILABLE"
    reason = "NO_WORKER"

    def __init__(self) -> None:
        super().__init__("no worker is ready", retry_after_s=1.0)


class Draining(QuireError):
    """The server is shutting down."""

    code = "UNAVAILABLE"
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the server is draining", retry_after_s=1.0)


class WorkerLost(QuireError):
    """Workers died again and again while they computed it. Trying again can succeed at once."""

    code = "UNAVAILABLE"
    reason = "WORKER_LOST"

    def __init__(self) -> None:
        super().__init__("workers died during the call; nothing was applied", retry_after_s=0.1)


class JournalUnavailable(QuireError):
    """The journal cannot be written: a full disk, say. Trying again can help once that is mended."""

    code = "UNAVAILABLE"
    reason = "JOURNAL_UNAVAILABLE"

    def __init__(self) -> None:
        super().__init__("the journal cannot be written; nothing was applied", retry_after_s=1.0)


class ResumedElsewhere(QuireError):
    """Another client reads the execution now."""

    code = "ABORTED"
    reason = "RESUMED_ELSEWHERE"

    def __init__(self) -> None:
        super().__init__("the execution was asked for again with its request_id, and goes on there")


class ExecutionLost(QuireError):
    """A client has a part of an execution, and what follows it is not there any more."""

    code = "FAILED_PRECONDITION"
    reason = "EXECUTION_LOST"

    def __init__(self) -> None:
        super().__init__(
            "what follows resume_after is not there any more, and made again it could be another text:"
            " ask under another request_id"
        )


class Loading(QuireError):
    """Other weights are being loaded, or those before are still in use."""

    code = "ABORTED"
    reason = "LOADING"

    def __init__(self) -> None:
        super().__init__("weights are being loaded or drained: one after the other", retry_after_s=1.0)


class DeadlinePassed(QuireError):
    """The call's deadline passed before its turn came, or a sample's before its end."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"

    def __init__(self, *, has_begun: bool = False) -> None:
        """`has_begun`: a part of a sample is there."""
        super().__init__(
            "the deadline passed before the sample's end; what came before stands"
            if has_begun
            else "the deadline passed before the call's turn came; nothing was applied"
        )


class MessageTimeout(QuireError):
    """The request took too long to arrive."""

    code = "DEADLINE_EXCEEDED"
    reason = "MESSAGE_TIMEOUT"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request did not arrive within {timeout_s:g} seconds; nothing was applied",
            metadata={"timeout_s": f"{timeout_s:g}"},
        )


class WorkerFault(QuireError):
    """A step failed inside the worker; nothing was applied."""

    code = "INTERNAL"
    reason = "WORKER_FAULT"

    def __init__(self) -> None:
        super().__init__("the step failed in the worker; nothing was applied")


class SequenceQuarantined(QuireError):
    """Workers died of this cache's tokens: it is not computed any more, and may only be released."""

    code = "INTERNAL"
    reason = "SEQUENCE_QUARANTINED"

    def __init__(self) -> None:
        super().__init__("workers died while they computed this sequence; it is not computed any more")


# What a remote provider's failure is to callers. Trouble with this server's credentials must not look like
# trouble with theirs: UNAUTHENTICATED, PERMISSION_DENIED. INVALID_ARGUMENT would have to name a field.
PROVIDER_CODES = {
    "RATE_LIMITED": "RESOURCE_EXHAUSTED",
    "BACKPRESSURE": "RESOURCE_EXHAUSTED",
    "BUDGET_EXCEEDED": "RESOURCE_EXHAUSTED",
    "CIRCUIT_OPEN": "UNAVAILABLE",
    "NETWORK_ERROR": "UNAVAILABLE",
    "SERVER_ERROR": "UNAVAILABLE",
    "TIMEOUT": "DEADLINE_EXCEEDED",
    "CONTEXT_LENGTH_EXCEEDED": "OUT_OF_RANGE",
    "CONTENT_FILTERED": "FAILED_PRECONDITION",
    "BAD_REQUEST": "FAILED_PRECONDITION",
    "UNAUTHORIZED": "FAILED_PRECONDITION",
    "FORBIDDEN": "FAILED_PRECONDITION",
    "UNSUPPORTED": "FAILED_PRECONDITION",
    "INTERNAL": "INTERNAL",
}


class ProviderFailure(QuireError):
    """A runtime's provider has failed, or a runtime was not asked. `field`: of an item, what it cannot do."""

    def __init__(
        self, reason: str, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, metadata={"field": field} if field else {}, retry_after_s=retry_after_s)
        self.reason, self.code = reason, PROVIDER_CODES[reason]


class InternalError(QuireError):
    """A bug of ours. The log has the rest, under the request id."""

    def __init__(self) -> None:
        super().__init__("internal error")
