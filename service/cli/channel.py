"""What the client commands share: how they connect, and how they tell of a failed call."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from service.printable import escaped

# Room for tokenizer.json of a large vocabulary.
MAX_RESPONSE_BYTES = 64 << 20
# A server that is there answers these at once.
CONTROL_TIMEOUT_S = 10.0
# What is drawn in place hides it.
_SHOW_CURSOR = "\x1b[?25h"


@contextlib.contextmanager
def connected(options: argparse.Namespace, interrupted: int = 1) -> Iterator[grpc.Channel]:
    """A channel to the server that the options name. Connects when first used.

    Ctrl-C ends the process within it, with the exit status `interrupted`. An exception in its place could
    come while gRPC begins a call, which then never ends, and closing would wait for it for ever, as the end
    of the interpreter would: https://github.com/grpc/grpc/issues/19973.

    Raises OSError for a file of the options that cannot be read.
    """
    before = signal.signal(signal.SIGINT, lambda *_: _end_process(interrupted))
    try:
        with _open_channel(options) as channel:
            yield channel
    finally:
        signal.signal(signal.SIGINT, before)


def _end_process(status: int) -> NoReturn:
    """What has been written stays. The server sees the connection end, and ends what it does for it."""
    # They may be in the middle of something, or have no reader any more.
    with contextlib.suppress(RuntimeError, OSError):
        sys.stdout.flush()
    with contextlib.suppress(RuntimeError, OSError):
        if sys.stderr.isatty():
            print(_SHOW_CURSOR, file=sys.stderr, flush=True)
    os._exit(status)


def _open_channel(options: argparse.Namespace) -> grpc.Channel:
    bounds = [("grpc.max_receive_message_length", MAX_RESPONSE_BYTES)]
    if options.ca:
        paths = (options.ca, options.key, options.cert)
        ca, key, cert = (Path(path).read_bytes() if path else None for path in paths)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.secure_channel(options.target, credentials, options=bounds)
    else:
        channel = grpc.insecure_channel(options.target, options=bounds)
    return grpc.intercept_channel(channel, _Bearer(options.token)) if options.token else channel


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a token with every call. Call credentials of gRPC would do so over TLS only."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, client_call_details: Any) -> _Details:
        return _Details(
            client_call_details.method,
            client_call_details.timeout,
            [*(client_call_details.metadata or ()), self._header],
            client_call_details.credentials,
            client_call_details.wait_for_ready,
            client_call_details.compression,
        )


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
    code, reason = call.code(), error_reason(call)
    _print_failure(code.name, reason, call.details() or "")
    if code == grpc.StatusCode.UNAVAILABLE and not reason:  # gRPC says so itself, not a server
        print("quire: is `make serve` running? --target names another server", file=sys.stderr)


def print_status(status: status_pb2.Status) -> None:
    """As `print_error`, for a failure that is told in an answer."""
    _print_failure(code_pb2.Code.Name(status.code), status_reason(status), status.message)


def _print_failure(*parts: str) -> None:
    print("quire:", *(escaped(part) for part in parts if part), file=sys.stderr)


def error_reason(call: grpc.Call) -> str:
    """The reason in the error's google.rpc.ErrorInfo, or an empty string."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the call's own code: not from our server
        return ""
    return status_reason(status) if status is not None else ""


def status_reason(status: status_pb2.Status) -> str:
    """As `error_reason`."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""
