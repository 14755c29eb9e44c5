"""What a failure says of itself, from a call's error or from a status in an answer."""

from __future__ import annotations

from typing import Any

from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


def reason_of(error: Any) -> str:
    """The reason of a call's error; empty: it has none."""
    status = rpc_status.from_call(error)
    return "" if status is None else status_reason(status)


def status_reason(status: status_pb2.Status) -> str:
    """The reason of a status; empty: it has none."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return info.reason
    return ""
