"""Converts errors into gRPC statuses with rich details."""

from __future__ import annotations

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from service.errors import InvalidArgument, QuireError

DOMAIN = "quire"
# Peers limit all gRPC metadata of a call to 16 KiB. The details stay well below that.
MAX_DETAIL_BYTES = 4096
_MAX_TEXT_BYTES = 512


def to_status(error: QuireError, request_id: str = "") -> status_pb2.Status:
    """The error as a status with ErrorInfo, and RetryInfo and BadRequest where they apply."""
    message = _truncated(error.message)
    metadata = dict(error.metadata)
    if request_id:
        metadata["request_id"] = request_id
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    extra: list[error_details_pb2.RetryInfo | error_details_pb2.BadRequest] = []
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        extra.append(retry)
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_truncated(error.field), description=message, reason=error.reason
        )
        extra.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    for detail in (*details, *extra):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _truncated(text: str) -> str:
    """The start of a text, in whole characters. Several such texts fit into MAX_DETAIL_BYTES."""
    return text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore")
