"""What the client commands share: how they connect, and how they tell of a failed call."""

from __future__ import annotations

import sys
from typing import cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# Room for tokenizer.json of a large vocabulary.
MAX_RESPONSE_BYTES = 64 << 20
# A server that is there answers these at once.
CONTROL_TIMEOUT_S = 10.0


def open_channel(target: str) -> grpc.Channel:
    """A channel to a server. Connects when first used; the caller closes it."""
    return grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", MAX_RESPONSE_BYTES)])


def print_error(error: grpc.RpcError) -> None:
    """Prints `CODE REASON message` on standard error; without the reason where the server gave none."""
    call = cast(grpc.Call, error)  # every error of a call also is that call
    parts = [call.code().name, error_reason(call), call.details() or ""]
    print("quire:", *(part for part in parts if part), file=sys.stderr)


def error_reason(call: grpc.Call) -> str:
    """The reason in the error's google.rpc.ErrorInfo, or an empty string."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the call's own code: not from our server
        return ""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""
