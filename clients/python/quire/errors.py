"""What a call can raise.

    QuireError
    ├── InvalidRequest        INVALID_ARGUMENT; `violations` names the fields
    ├── NotFound              NOT_FOUND
    │   ├── CacheNotFound
    │   └── RuntimeNotFound
    ├── PreconditionFailed    FAILED_PRECONDITION
    │   └── PositionMismatch  the cache has another length than this client believes: `seq_len`
    ├── OutOfRange            OUT_OF_RANGE
    ├── ResourceExhausted     RESOURCE_EXHAUSTED
    ├── Aborted               ABORTED: another call has taken this one's place
    ├── Unavailable           UNAVAILABLE, after the retries
    │   └── SessionEnded      the session is closed or broken: what ended it is the __cause__
    ├── Unauthenticated       UNAUTHENTICATED
    ├── PermissionDenied      PERMISSION_DENIED: the token has not the role
    ├── DeadlineExceeded      DEADLINE_EXCEEDED
    ├── Cancelled             CANCELLED
    └── InternalError         everything else

`reason` is stable and meant for programs, the message for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        # Such as "KV_EXHAUSTED". Empty if the failure was not told by a Quire server.
        self.reason = reason
        self.message = message
        # Numbers that go with the reason, as strings, and perhaps the server's request_id.
        self.metadata = dict(metadata or {})
        # How long to wait before trying again. None: trying again will not help, or nothing is known.
        self.retry_delay_s = retry_delay_s
        # (field, what is wrong with it)
        self.violations = tuple(violations)


class InvalidRequest(QuireError):
    """The request itself is wrong."""


class NotFound(QuireError):
    """The server has nothing of that name."""


class RuntimeNotFound(NotFound):
    """The server's configuration has no such runtime."""


class CacheNotFound(NotFound):
    """The cache never existed, was released, or its lease ran out."""


class PreconditionFailed(QuireError):
    """It cannot be done in the state that things are in."""


class PositionMismatch(PreconditionFailed):
    """Somebody else changed the cache, or an earlier call was applied without this client's knowledge."""

    @property
    def seq_len(self) -> int:
        """The cache's real length in tokens."""
        return int(self.metadata["seq_len"])


class OutOfRange(QuireError):
    """Past the end of the cache, or of the model's context."""


class ResourceExhausted(QuireError):
    """No pages, no room in the queue, or no quota left; or a message over the size limit."""


class Aborted(QuireError):
    """Another call has taken its place, or is in its way: `reason` says RESUMED_ELSEWHERE, or LOADING."""


class Unavailable(QuireError):
    """The server cannot be reached, or has no worker, or cannot write its journal. Caches stay."""


class SessionEnded(Unavailable):
    """The session is closed or broken; what ended it is the `__cause__`, and its reason is `reason`.

    Appends may be repeated on another session: see `adopt`. One that was applied is answered, never applied
    twice.
    """


class Unauthenticated(QuireError):
    """The server does not know who calls: no token, or one that it does not know."""


class PermissionDenied(QuireError):
    """The token has not the role that the call needs."""


class DeadlineExceeded(QuireError):
    """The time limit passed. An append may have been applied: repeating it is safe."""


class Cancelled(QuireError):
    """The call was cancelled."""


class InternalError(QuireError):
    """The server failed, or answered in a way that this client does not know."""


_BY_REASON: Mapping[str, type[QuireError]] = {
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


def from_status(status: status_pb2.Status) -> QuireError:
    """The exception for a google.rpc.Status, such as that of a failed item of a batch."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    request = error_details_pb2.BadRequest()
    retry_delay_s = None
    for detail in status.details:
        # Unpack fills the message that the detail is of, and leaves the others alone.
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


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """The exception for what a gRPC call raised, with the rich details that Quire attaches."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    code = error.code()
    status = status_pb2.Status(code=code.value[0], message=error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            rich = _parse(value)
            # A proxy may have replaced the status; then the details are about another failure.
            if rich is not None and rich.code == status.code:
                status = rich
    return from_status(status)


def _parse(serialized: bytes) -> status_pb2.Status | None:
    try:
        return status_pb2.Status.FromString(serialized)
    except DecodeError:
        return None
