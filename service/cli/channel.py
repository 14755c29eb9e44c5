"""What the client commands share: how they connect, and how they tell of a failed call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from service.printable import escaped

# Room for tokenizer.json of a large vocabulary.
MAX_RESPONSE_BYTES = 64 << 20
# A server that is there answers these at once.
CONTROL_TIMEOUT_S = 10.0


def open_channel(options: argparse.Namespace) -> grpc.Channel:
    """A channel to the server that the options name. Connects when first used; the caller closes it.

    Raises OSError for a file of the options that cannot be read.
    """
    bounds = [("grpc.max_receive_message_length", MAX_RESPONSE_BYTES)]
    if options.ca:
        paths = (options.ca, options.key, options.cert)
        ca, key, cert = (Path(path).read_bytes() if path else None for path in paths)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.secure_channel(options.target, credentials, options=bounds)
    else:
        channel = grpc.insecure_channel(options.target, options=bounds)
    return grpc.intercept_channel(channel, _Bearer(options.token)) if options.token else channel


class _Bearer(grpc.UnaryUnaryClientInterceptor):
    """Sends a token with every call. Call credentials of gRPC would do so over TLS only."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details = _Details(
            client_call_details.method,
            client_call_details.timeout,
            [*(client_call_details.metadata or ()), self._header],
            client_call_details.credentials,
            client_call_details.wait_for_ready,
            client_call_details.compression,
        )
        return continuation(details, request)


class _Details(NamedTuple):
    """A call with another metadata; gRPC has no such class of its own."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


def print_error(error: grpc.RpcError) -> None:
    """Prints `CODE REASON message` on standard error; without the reason where the server gave none."""
    call = cast(grpc.Call, error)  # every error of a call also is that call
    parts = [call.code().name, error_reason(call), call.details() or ""]
    print("quire:", *(escaped(part) for part in parts if part), file=sys.stderr)


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
