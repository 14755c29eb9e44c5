"""What a failure says of itself, from a call's error or from a status in an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


def reason_of(error: Any) -> str:
    """The reason of a call's error; empty: it has none."""
    return info_of(error).reason


def refused(call: Callable[[], object]) -> str:
    """Makes a call that fails; the reason."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    return reason_of(error.value)


def info_of(error: Any) -> error_details_pb2.ErrorInfo:
    """The reason of a call's error and what belongs to it; empty: it has none."""
    status = rpc_status.from_call(error)
    return error_details_pb2.ErrorInfo() if status is None else status_info(status)


def status_reason(status: status_pb2.Status) -> str:
    """The reason of a status; empty: it has none."""
    return status_info(status).reason


def status_info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The reason of a status and what belongs to it; empty: it has none."""
    info = error_details_pb2.ErrorInfo()
    any(detail.Unpack(info) for detail in status.details)
    return info
