"""The commands' connection to a server: a client without retries, and messages for its errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
from quire import Client, PermissionDenied, QuireError, Tls
from quire._proxies import proxy_of
from quire.cli.terminal import CommandFailed, WrongUsage, tell
from quire.errors import from_rpc_error
from quire.v1 import executor_pb2

# The timeout of calls that a running server answers immediately.
CONTROL_TIMEOUT_S = 10.0
# A year: effectively no timeout.
NO_TIMEOUT_S = 365 * 86_400.0
_NO_WORKER = "NO_WORKER"
# How long to wait for a worker to load, and the polling interval.
_WORKER_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.5
_Client = TypeVar("_Client")
_Answer = TypeVar("_Answer")


def connection(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `new_client` for the server that the options name. Raises WrongUsage."""
    if (options.cert or options.key) and not options.ca:
        raise WrongUsage("--cert and --key are used with --ca only")
    tls = Tls(ca=options.ca, cert=options.cert or None, key=options.key or None) if options.ca else False
    # The user gives both the token and the target.
    return {"target": options.target, "tls": tls, "token": options.token, "token_in_plain_view": True}


def new_client(kind: Callable[..., _Client], connection: Mapping[str, Any], **settings: Any) -> _Client:
    """A client without retries. Raises WrongUsage, and OSError for an unreadable file."""
    try:
        return kind(**connection, retries=False, **settings)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


@contextlib.contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """A client of the server that the options name. Connects when first used.

    Within the block, Ctrl-C ends the process. A KeyboardInterrupt could be raised while gRPC starts a call.
    That call would never end, and both `close` and the interpreter's exit would hang:
    https://github.com/grpc/grpc/issues/19973.

    Converts the client's exceptions to CommandFailed. Raises OSError for an unreadable file.
    """
    before = signal.signal(signal.SIGINT, lambda *_: _end_process())
    try:
        client = new_client(Client, connection(options), timeout_s=CONTROL_TIMEOUT_S)
        with converting_failures(options), client:
            yield client
    finally:
        signal.signal(signal.SIGINT, before)


def when_ready(client: Client, call: Callable[[], _Answer]) -> _Answer:
    """The result of `call`, once a worker is ready or after a timeout. Raises its exceptions."""
    give_up_s = time.monotonic() + _WORKER_TIMEOUT_S
    shown, may_ask = "", True
    while True:
        is_starting, progress = False, " to load"
        if may_ask:
            try:
                is_starting, progress = _progress(client)
            except PermissionDenied:
                # The call then waits without a sign of life.
                may_ask = False
        if not is_starting or time.monotonic() > give_up_s:
            try:
                return call()
            except QuireError as error:
                if error.reason != _NO_WORKER or time.monotonic() > give_up_s:
                    raise
        if progress != shown:
            tell(f"waiting for a worker{progress}")
            shown = progress
        time.sleep(_POLL_INTERVAL_S)


def _progress(client: Client) -> tuple[bool, str]:
    """Whether no worker is ready yet, and the loading progress of the workers as the end of a sentence."""
    status = client.status()
    most = max((worker.load_progress for worker in status.workers), default=0)
    return status.state == executor_pb2.SERVER_STATE_STARTING, f": loading {most:.0%}"


def _end_process() -> NoReturn:
    """Flushes the output and exits. The server cancels the calls when the connection closes."""
    # It may be in use by the interrupted code, or be closed.
    with contextlib.suppress(RuntimeError, OSError):
        sys.stdout.flush()
    os._exit(1)


@contextlib.contextmanager
def converting_failures(options: argparse.Namespace) -> Iterator[None]:
    """Converts failed calls to the server that the options name to CommandFailed with `line_of`."""
    try:
        yield
    except (QuireError, grpc.RpcError) as failed:
        error = failed if isinstance(failed, QuireError) else from_rpc_error(failed)
        lines = [line_of(error)]
        # Without a reason the error is from gRPC, not from a server.
        if error.code == grpc.StatusCode.UNAVAILABLE and not error.reason:
            # A server with TLS only closes the connection.
            without_tls = "" if options.ca else "; with TLS it needs --ca"
            lines.append(f"--target or QUIRE_TARGET selects the server{without_tls}")
            if proxy := proxy_of(options.target):
                lines.append(
                    f"the connection goes through the proxy {proxy}; no_proxy lists what does without"
                )
        if error.reason == "NO_TOKEN":
            lines.append("give the token as --token or QUIRE_TOKEN")
        if error.reason == "ADAPTER_NOT_FOUND":
            lines.append("`quire adapters list` lists the adapters, `quire adapters load` adds one")
        raise CommandFailed(*lines) from error


def line_of(error: QuireError) -> str:
    """`CODE REASON message`, without empty parts."""
    return " ".join(part for part in (error.code.name, error.reason, error.message) if part)
