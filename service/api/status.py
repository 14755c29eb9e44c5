"""Converts errors into gRPC statuses with rich details, and back."""

from __future__ import annotations

import re

from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from service.errors import InvalidArgument, QuireError

DOMAIN = "quire"
# Peers limit the gRPC metadata of a call to 16 KiB. The details, with several texts, stay well below it.
_MAX_TEXT_BYTES = 512
_ITEM = re.compile(r"items\[\d+\]")


def to_status(error: QuireError, request_id: str = "") -> status_pb2.Status:
    """Converts an error to a status with ErrorInfo, and with RetryInfo and BadRequest where they apply."""
    message = _truncated(error.message)
    metadata = dict(error.metadata)
    is_invalid = isinstance(error, InvalidArgument)
    if error.field and not is_invalid:
        metadata["field"] = error.field
    if request_id:
        metadata["request_id"] = request_id
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    if is_invalid:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_truncated(error.field), description=message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_status(status: status_pb2.Status) -> QuireError:
    """Converts a status of another gateway back to the error."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        # Unpack does nothing for a detail of another type.
        detail.Unpack(info) or detail.Unpack(retry) or detail.Unpack(bad)
    metadata = {name: value for name, value in info.metadata.items() if name != "request_id"}
    if bad.field_violations:
        error: QuireError = InvalidArgument(info.reason, bad.field_violations[0].field, status.message)
    else:
        error = QuireError(status.message)
        error.field = metadata.pop("field", "")
    error.metadata = metadata
    error.code, error.reason = code_pb2.Code.Name(status.code), info.reason or error.reason
    if retry.HasField("retry_delay"):
        error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return error


def renumber(status: status_pb2.Status, index: int) -> None:
    """Makes the error of an item name it by its index in the caller's batch."""
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad):
            for violation in bad.field_violations:
                violation.field = _ITEM.sub(f"items[{index}]", violation.field, count=1)
            detail.Pack(bad)


def _truncated(text: str) -> str:
    """The beginning of a text, cut between characters."""
    return text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore")
