"""The exceptions of failed calls.

    QuireError
    ├── InvalidRequest        INVALID_ARGUMENT; `violations` names the fields
    ├── NotFound              NOT_FOUND
    │   ├── AdapterNotFound
    │   ├── CacheNotFound
    │   └── RuntimeNotFound
    ├── PreconditionFailed    FAILED_PRECONDITION
    │   └── PositionMismatch  the cache has another length than expected: `seq_len`
    ├── OutOfRange            OUT_OF_RANGE
    ├── ResourceExhausted     RESOURCE_EXHAUSTED
    ├── Aborted               ABORTED: another call replaced or blocks this one
    ├── Unavailable           UNAVAILABLE, after the retries
    │   └── SessionEnded      the session is closed or broken; its cause is the __cause__
    ├── Unauthenticated       UNAUTHENTICATED
    ├── PermissionDenied      PERMISSION_DENIED: the token does not have the role
    ├── DeadlineExceeded      DEADLINE_EXCEEDED
    ├── Cancelled             CANCELLED
    └── InternalError         everything else

`reason` is stable and machine-readable. The message is for humans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class QuireError(Exception):
    """A failed call, or a failed item of a batch."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
        violations: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(f"{code.name} {reason}: {message}" if reason else f"{code.name}: {message}")
        self.code = code
        # Such as "KV_EXHAUSTED". Empty if the failure was not reported by a Quire server.
        self.reason = reason
        self.message = message
        # Details of the reason, such as numbers, as strings. May include the server's request_id.
        self.metadata = dict(metadata or {})
        # How long to wait before a retry. None: a retry does not help, or it is not known.
        self.retry_delay_s = retry_delay_s
        # (field, what is wrong with it)
        self.violations = tuple(violations)

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies, and on the way from one process to another. Python's own passes only the text.
        return type(self), (self.code, self.reason, self.message), self.__dict__


class InvalidRequest(QuireError):
    """The request is invalid."""


class NotFound(QuireError):
    """The named object does not exist."""


class RuntimeNotFound(NotFound):
    """The server's configuration has no such runtime."""


class AdapterNotFound(NotFound):
    """No adapter has this id, or it is another tenant's."""


class CacheNotFound(NotFound):
    """The cache never existed, was released, or its lease ran out."""


class PreconditionFailed(QuireError):
    """The current state does not allow the call."""


class PositionMismatch(PreconditionFailed):
    """Another client changed the cache, or an earlier call was applied although its response was lost."""

    @property
    def seq_len(self) -> int:
        """The cache's real length in tokens."""
        return int(self.metadata["seq_len"])


class OutOfRange(QuireError):
    """A position is beyond the end of the cache, or of the model's context."""


class ResourceExhausted(QuireError):
    """The KV pages, the queue or the quota are exhausted, or a message exceeds the size limit."""


class Aborted(QuireError):
    """Another call replaced this one (`reason` RESUMED_ELSEWHERE), or blocks it (LOADING)."""


class Unavailable(QuireError):
    """The server is unreachable, has no worker, or cannot write to its disk. Caches are kept."""


class SessionEnded(Unavailable):
    """The session is closed or broken. The error that ended it is the `__cause__`; `reason` is its reason.

    Appends can be retried on another session, see `adopt`. An append that was already applied returns its
    response and is not applied twice.
    """


class Unauthenticated(QuireError):
    """The call has no token, or an unknown one."""


class PermissionDenied(QuireError):
    """The token does not have the role that the call requires."""


class DeadlineExceeded(QuireError):
    """The timeout passed. An append may have been applied; retrying it is safe."""


class Cancelled(QuireError):
    """The call was cancelled."""


class InternalError(QuireError):
    """The server failed, or its response is unknown to this client."""


_BY_REASON: Mapping[str, type[QuireError]] = {
    "ADAPTER_NOT_FOUND": AdapterNotFound,
    "CACHE_NOT_FOUND": CacheNotFound,
    "POSITION_MISMATCH": PositionMismatch,
    "RUNTIME_NOT_FOUND": RuntimeNotFound,
}
_BY_CODE: Mapping[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionFailed,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

# The codes of calls that were broken off on their way, if the error has no reason.
_BROKEN_OFF = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def from_status(status: status_pb2.Status) -> QuireError:
    """The exception for a google.rpc.Status, such as that of a failed item of a batch."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    request = error_details_pb2.BadRequest()
    retry_delay_s = None
    for detail in status.details:
        # Unpack fills a message only if the detail is of its type.
        if detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif not detail.Unpack(info):
            detail.Unpack(request)
    kind = _BY_REASON.get(info.reason) or _BY_CODE.get(code, InternalError)
    return kind(
        code,
        info.reason,
        status.message,
        metadata=info.metadata,
        retry_delay_s=retry_delay_s,
        violations=[(violation.field, violation.description) for violation in request.field_violations],
    )


def from_rpc_error(error: grpc.RpcError, proxy: str = "") -> QuireError:
    """The exception for a failed gRPC call, with the error details that Quire attaches.

    `proxy`: that of the call's target. It is named where the failure may be the proxy's.
    """
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    code = error.code()
    status = status_pb2.Status(code=code.value[0], message=error.details() or "")
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in status.message.lower():
        status.message += " (is a server running there?)"
    if proxy and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        status.message += f" (through the proxy {proxy})"
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            rich = _parse(value)
            # If a proxy has replaced the status, the details describe another failure.
            if rich is not None and rich.code == status.code:
                status = rich
    return from_status(status)


def is_connection_error(error: QuireError) -> bool:
    """Whether a call has failed on its way: the server is away, or the stream was broken off.

    Then a call that is safe to repeat can succeed. An error of the server itself has a reason. Without one it
    is gRPC's, as of a server that stops before it has read the call, or that of a proxy.
    """
    is_broken_off = error.code in _BROKEN_OFF and not error.reason
    return is_broken_off or isinstance(error, Unavailable)


def _parse(serialized: bytes) -> status_pb2.Status | None:
    try:
        return status_pb2.Status.FromString(serialized)
    except DecodeError:
        return None
