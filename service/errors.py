"""Every failure that a client can see: one class each, with its gRPC code, its reason and its message.

docs/errors.md says when each occurs. Messages are for the caller. They contain only what the caller sent or
may know. RetryInfo is attached only where a retry can help.
"""

from __future__ import annotations

import asyncio
from typing import Self

from service.printable import escaped

# How many characters of a caller's input a message shows.
_SHOWN_CHARACTERS = 64
# These end a task or the process without a failure. Code that must answer a call catches everything else: a
# panic of a library in Rust is a BaseException but not an Exception.
NOT_FAILURES = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class QuireError(Exception):
    """A failure with a stable reason and the name of its gRPC code.

    `metadata` has values for programs, as strings. `field` is the path of a field of the request, such as
    `items[3].token_id`; empty if it is about none.
    """

    code: str = "INTERNAL"
    reason: str = "INTERNAL"
    message: str = "internal error"
    retry_after_s: float | None = None

    def __init_subclass__(
        cls, *, code: str = "", reason: str = "", retry_after_s: float | None = None
    ) -> None:
        """Sets what a class declares in its first line. Without a reason, each instance sets its own."""
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.reason = reason or cls.reason
        cls.retry_after_s = retry_after_s

    def __init__(
        self,
        message: str | None = None,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        """Arguments that are not given have the values that the class declares."""
        if message is not None:
            self.message = message
        super().__init__(self.message)
        self.field = field
        self.metadata = {name: str(value) for name, value in metadata.items()}
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def with_index(self, index: int, count: int) -> Self:
        """Names the cache that failed by its index, if the call has several (`count`). Returns itself."""
        if count > 1:
            self.metadata["index"] = str(index)
        return self

    def at(self, field: str) -> Self:
        """The same failure with the path of the field as the caller knows it, also in the message."""
        text = self.message
        if text.startswith((f"{self.field} ", f"{self.field}: ")):
            text = field + text.removeprefix(self.field)
        return self._copy(text, field)

    def after(self, prefix: str) -> Self:
        """The same failure with a text before its message."""
        return self._copy(prefix + self.message, self.field)

    def nested_in(self, prefix: str) -> Self:
        """The same failure with the field's path as seen from the enclosing message."""
        return self.at(f"{prefix}.{self.field}")

    def without_traceback(self) -> Self:
        """Drops the traceback of an error that is stored or sent. Returns itself.

        Its frames refer to the refused request, and often to the error itself: a cycle. The request would
        stay in memory until the next garbage collection, which counts objects, not bytes.
        """
        self.__traceback__ = None
        return self

    def _copy(self, message: str, field: str) -> Self:
        error = type(self).__new__(type(self), message)
        vars(error).update(vars(self), message=message, field=field, metadata=dict(self.metadata))
        return error


class InvalidArgument(QuireError, code="INVALID_ARGUMENT"):
    """The request is invalid."""

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(message, field=field)
        self.reason = reason


def too_many(field: str, limit: int) -> InvalidArgument:
    """A message has more calls, items, forks, request ids or fields than the server accepts."""
    reason = "TOO_MANY_ITEMS" if field in ("forks", "request_ids") else f"TOO_MANY_{field.upper()}"
    return InvalidArgument(reason, field, f"at most {limit} {field} are allowed")


def malformed_request(message: str = "the request is not a valid message") -> InvalidArgument:
    """The bytes of a request are not a message."""
    return InvalidArgument("MALFORMED_REQUEST", "", message)


def bad_page_token() -> InvalidArgument:
    """The token of a page is not one of this server."""
    return InvalidArgument("BAD_PAGE_TOKEN", "page_token", "must be one that ListCaches returned")


def reused_request_id() -> InvalidArgument:
    """The request id belongs to another request."""
    return InvalidArgument("REQUEST_ID_REUSED", "request_id", "the request_id belongs to another request")


class CacheNotFound(QuireError, code="NOT_FOUND", reason="CACHE_NOT_FOUND"):
    """The cache never existed, was released, has expired, or belongs to another tenant."""

    message = "no such cache: it never existed, was released, or its lease expired"


class AdapterNotFound(QuireError, code="NOT_FOUND", reason="ADAPTER_NOT_FOUND"):
    def __init__(self, adapter_id: str) -> None:
        shown = escaped(adapter_id[:_SHOWN_CHARACTERS])
        super().__init__(f"no such adapter: '{shown}'; ListAdapters returns those that can be used")


class RuntimeNotFound(QuireError, code="NOT_FOUND", reason="RUNTIME_NOT_FOUND"):
    message = "no such runtime: ListRuntimes returns the names of all runtimes"


class PositionMismatch(QuireError, code="FAILED_PRECONDITION", reason="POSITION_MISMATCH"):
    """`position` is not the cache's length, and the append does not repeat the last one."""

    def __init__(self, stated: int, actual: int) -> None:
        message = f"position is {stated}, but the cache has {actual} tokens"
        super().__init__(message, position=stated, seq_len=actual)


class Unsupported(QuireError, code="FAILED_PRECONDITION", reason="UNSUPPORTED_BY_EXECUTOR"):
    """The executor does not support the request."""


def without_lora(reason: str, field: str = "") -> Unsupported:
    """The error for an adapter where there are none. `reason`: see ExecutorCapabilities.backend_reason."""
    why = f": the transformers library runs this model, and native code does not, because of {reason}"
    return Unsupported("this executor does not support LoRA adapters" + (why if reason else ""), field=field)


class NoTokenizer(QuireError, code="FAILED_PRECONDITION", reason="NO_TOKENIZER"):
    message = "the model has no tokenizer: send token ids and request token ids"


class WeightsChanged(QuireError, code="FAILED_PRECONDITION", reason="WEIGHTS_CHANGED"):
    """The server serves other weights than those of the cache, or than those the call was checked against."""

    def __init__(self, *, can_be_repeated: bool = False) -> None:
        """`can_be_repeated`: the call uses no cache of the previous weights, so a retry can succeed."""
        advice = "nothing was applied, retry" if can_be_repeated else "this cache can only be released"
        retry_after_s = 0.01 if can_be_repeated else None
        super().__init__(f"the server now serves other weights: {advice}", retry_after_s=retry_after_s)


class SeveralShards(QuireError, code="FAILED_PRECONDITION", reason="SEVERAL_SHARDS"):
    message = "the caches belong to several gateways: make one call for those of each gateway"


class SeveralGateways(QuireError, code="FAILED_PRECONDITION", reason="SEVERAL_GATEWAYS"):
    message = "the server has several gateways, and this call would change one of them: use the settings"


class AdapterLost(QuireError, code="FAILED_PRECONDITION", reason="ADAPTER_LOST"):
    """A version of an adapter cannot be loaded, or not any more. `why` is for the caller."""

    def __init__(self, why: str) -> None:
        advice = "load the adapter again, or restore its files, which existing caches of this version need"
        super().__init__(f"{why}: {advice}")


class LoadFailed(QuireError, code="FAILED_PRECONDITION", reason="LOAD_FAILED"):
    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the server keeps serving the previous weights")


class BadRuntimes(QuireError, code="FAILED_PRECONDITION", reason="BAD_RUNTIMES"):
    """The runtimes file is invalid. `why` gives the location in the file, and none of its contents."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the runtimes file cannot be used: {why}")


class ExecutionLost(QuireError, code="FAILED_PRECONDITION", reason="EXECUTION_LOST"):
    message = (
        "the chunks after resume_after are not stored any more, and generating them again could give another"
        " text: use another request_id"
    )


class SequenceTooLong(QuireError, code="OUT_OF_RANGE", reason="SEQUENCE_TOO_LONG"):
    """The sequence would exceed the model's context or the whole KV pool. Waiting cannot help."""

    def __init__(self, wanted: int, limit: int, field: str = "") -> None:
        """`field`: of the request, which has one of several."""
        message = f"the sequence would have {wanted} tokens, the limit is {limit}"
        super().__init__(message, field=field, wanted_tokens=wanted, kv_capacity_tokens=limit)


class TruncateBeyondEnd(QuireError, code="OUT_OF_RANGE", reason="TRUNCATE_BEYOND_END"):
    def __init__(self, new_len: int, actual: int) -> None:
        message = f"new_len is {new_len}, but the cache has only {actual} tokens"
        super().__init__(message, new_len=new_len, seq_len=actual)


class KvExhausted(QuireError, code="RESOURCE_EXHAUSTED", reason="KV_EXHAUSTED", retry_after_s=0.1):
    """The worker has too few KV pages, even after the eviction of all cached ones."""

    def __init__(self, needed: int, available: int) -> None:
        self.pages_needed, self.pages_available = needed, available
        message = f"needs {needed} KV pages, {available} are available: release or truncate caches"
        super().__init__(message, pages_needed=needed, pages_available=available)


class QueueFull(QuireError, code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"):
    def __init__(self, limit: int, retry_after_s: float, *, of_tenant: bool = False) -> None:
        message = f"{limit} operations{' of the tenant' if of_tenant else ''} are already waiting or running"
        super().__init__(message, retry_after_s=retry_after_s, limit=limit)


class BudgetFull(QuireError, code="RESOURCE_EXHAUSTED"):
    """The server, or the tenant, holds as much of a resource as it may: see `budgets`."""

    # What is held, with places for the limit and for whose it is.
    message = "{limit}{of_tenant} are held"
    unit = ""

    def __init__(self, limit: int, *, of_tenant: bool = False) -> None:
        super().__init__(self.message.format(limit=limit, of_tenant=" of the tenant" if of_tenant else ""))
        self.metadata[f"limit{self.unit}"] = str(limit)


class TooManyExecutions(BudgetFull, reason="QUEUE_FULL", retry_after_s=1.0):
    message = "{limit} executions{of_tenant} are already running"


class Overloaded(QuireError, code="RESOURCE_EXHAUSTED", reason="OVERLOADED"):
    """The work ahead in the queue takes longer than the call may wait, or the call has waited that long."""

    def __init__(self, expected_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(
            f"the call would take about {expected_s:.2f} seconds, its priority allows {left_s:.2f}",
            retry_after_s=retry_after_s,
            expected_ms=int(expected_s * 1000),
            left_ms=int(left_s * 1000),
        )


class CacheLimit(QuireError, code="RESOURCE_EXHAUSTED", reason="CACHE_LIMIT", retry_after_s=1.0):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the server has {limit} caches, its limit: release some", limit=limit)


class JournalFull(QuireError, code="RESOURCE_EXHAUSTED", reason="JOURNAL_FULL", retry_after_s=1.0):
    def __init__(self, limit_bytes: int) -> None:
        message = f"the tokens of all caches take {limit_bytes} bytes, the limit: release or truncate some"
        super().__init__(message, limit_bytes=limit_bytes)


class AnswersFull(BudgetFull, reason="ANSWERS_FULL", retry_after_s=0.1):
    message = "answers{of_tenant} that are computed or not yet read take {limit} bytes, the limit"
    unit = "_bytes"


class ArrivingFull(BudgetFull, reason="ARRIVING_FULL", retry_after_s=1.0):
    message = "requests{of_tenant} that are slow to arrive and HTTP bodies take {limit} bytes, the limit"
    unit = "_bytes"


class SessionLimit(BudgetFull, reason="SESSION_LIMIT", retry_after_s=1.0):
    message = "{limit} Sessions{of_tenant}, or other streams of requests, are open"


class WatchLimit(SessionLimit, retry_after_s=1.0):
    message = "{limit} health watches are open"


class HttpLimit(SessionLimit, retry_after_s=1.0):
    message = "{limit} HTTP requests{of_tenant} are not answered yet"


class SlowConsumer(QuireError, code="RESOURCE_EXHAUSTED", reason="SLOW_CONSUMER"):
    def __init__(self, stalled_s: float) -> None:
        super().__init__(f"no answer was read for {stalled_s:g} seconds; unanswered calls are undone")


class QuotaExceeded(QuireError, code="RESOURCE_EXHAUSTED", reason="QUOTA"):
    def __init__(self, quota: str, limit: float, retry_after_s: float | None = None) -> None:
        message = f"the tenant's quota {quota} of {limit:g} is used up"
        super().__init__(message, retry_after_s=retry_after_s, quota=quota, limit=f"{limit:g}")


class AdapterLimit(QuireError, code="RESOURCE_EXHAUSTED", reason="ADAPTER_LIMIT", retry_after_s=1.0):
    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"the server has {limit} {what}, its limit", limit=limit)


class NoMemory(QuireError, code="RESOURCE_EXHAUSTED", reason="NO_MEMORY"):
    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        message = (
            f"the new weights need {needed_bytes >> 20} MiB beside those that are served,"
            f" {available_bytes >> 20} MiB are free"
        )
        super().__init__(message, needed_bytes=needed_bytes, available_bytes=available_bytes)


class Unauthenticated(QuireError, code="UNAUTHENTICATED"):
    """The caller is unknown. The error does not reveal which tokens exist."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RoleMissing(QuireError, code="PERMISSION_DENIED", reason="ROLE_MISSING"):
    def __init__(self, role: str) -> None:
        super().__init__(f"this call needs the role {role}", role=role)


class NoWorker(QuireError, code="UNAVAILABLE", reason="NO_WORKER", retry_after_s=1.0):
    message = "no worker is ready: the model is being loaded, or workers are being replaced"


class Draining(QuireError, code="UNAVAILABLE", reason="DRAINING", retry_after_s=1.0):
    message = "the server is draining"


class GatewayUnavailable(QuireError, code="UNAVAILABLE", reason="GATEWAY_UNAVAILABLE", retry_after_s=0.5):
    """The gateway that has the cache was not reached, or lost on the way: it may have applied the call."""

    message = "the gateway that has this cache cannot be reached; with `position` the call can be repeated"


class ShardMoved(QuireError, code="UNAVAILABLE", reason="SHARD_MOVED", retry_after_s=0.2):
    message = "the cache has just moved to another gateway; nothing was applied"


class WorkerLost(QuireError, code="UNAVAILABLE", reason="WORKER_LOST", retry_after_s=0.1):
    message = "workers died during the call; nothing was applied"


class JournalUnavailable(QuireError, code="UNAVAILABLE", reason="JOURNAL_UNAVAILABLE", retry_after_s=1.0):
    message = "the journal cannot be written; nothing was applied"


class StorageUnavailable(QuireError, code="UNAVAILABLE", reason="STORAGE_UNAVAILABLE", retry_after_s=1.0):
    def __init__(self, why: str | None) -> None:
        super().__init__(f"the server cannot store it: {why}; nothing was changed")


class ResumedElsewhere(QuireError, code="ABORTED", reason="RESUMED_ELSEWHERE"):
    message = "another call resumed the execution by its request_id"


class Loading(QuireError, code="ABORTED", reason="LOADING", retry_after_s=1.0):
    message = "weights are already being uploaded or loaded, or the previous ones drained: retry later"


class DeadlinePassed(QuireError, code="DEADLINE_EXCEEDED", reason="DEADLINE_PASSED"):
    """The call's deadline passed before it started, or a sample's deadline before it was finished."""

    def __init__(self, *, has_begun: bool = False, forwarded: bool = False) -> None:
        """`has_begun`: a part of the sample was generated. `forwarded`: to the gateway that has the cache."""
        message = "the deadline passed before the call was started; nothing was applied"
        if has_begun:
            message = "the deadline passed before the sample was finished; the chunks sent so far are valid"
        elif forwarded:
            message = "the deadline passed before the gateway that has the cache answered"
        super().__init__(message)


class MessageTimeout(QuireError, code="DEADLINE_EXCEEDED", reason="MESSAGE_TIMEOUT"):
    def __init__(self, timeout_s: float) -> None:
        message = f"the request did not arrive within {timeout_s:g} seconds; nothing was applied"
        super().__init__(message, timeout_s=f"{timeout_s:g}")


class WorkerFault(QuireError, code="INTERNAL", reason="WORKER_FAULT"):
    message = "the step failed in the worker; nothing was applied"


class HelperFailed(QuireError, code="INTERNAL", reason="HELPER_FAILED"):
    message = "a helper process of the server did not start; nothing was applied"


class SequenceQuarantined(QuireError, code="INTERNAL", reason="SEQUENCE_QUARANTINED"):
    message = "workers died while they computed this sequence: it is quarantined, and can only be released"


# The gRPC code of each failure of a remote provider. UNAUTHENTICATED and PERMISSION_DENIED do not occur: a
# problem with this server's credentials must not look like one with the caller's. INVALID_ARGUMENT would have
# to name a field.
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
    """A provider failed, or was not called. `field`: the field of an item that it does not support."""

    def __init__(
        self, reason: str, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.reason, self.code = reason, PROVIDER_CODES[reason]


class InternalError(QuireError):
    """A bug in this server. The log has details under the request id."""
