"""What can be held of a gateway by connecting and sending: connections, unfinished requests, Sessions."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import psutil
import pytest
from quire import errors as client_errors
from quire.v1 import executor_pb2 as pb

from tests import http2
from tests.e2e.unharmed import TIMEOUT_S, unharmed
from tests.gateway_process import GatewayProcess

CONNECTIONS = 20
# A quarter of the connections.
SESSIONS = 5
LIMITS = {
    "--max-connections": CONNECTIONS,
    "--message-timeout-s": 1.5,
    # Half of it for what is slow to arrive.
    "--max-unread-bytes": 2 << 20,
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    flags = [word for name, value in LIMITS.items() for word in (name, str(value))]
    with GatewayProcess(model="paged-attention", workers=2, flags=["--kv-pages", "64", *flags]) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def gateway_goes_on(gateway: GatewayProcess) -> Iterator[None]:
    with unharmed(gateway):
        yield


def everything(connection: socket.socket) -> bytes:
    """What comes until the other end hangs up."""
    received = b""
    while part := connection.recv(65_536):
        received += part
    return received


def test_the_limits_are_told(gateway: GatewayProcess) -> None:
    limits = gateway.capabilities().limits
    assert (limits.max_connections, limits.max_sessions) == (CONNECTIONS, SESSIONS)
    assert (limits.message_timeout.ToMilliseconds(), limits.max_arriving_bytes) == (1500, 1 << 20)


def test_a_connection_that_never_speaks_is_hung_up_on(gateway: GatewayProcess) -> None:
    with http2.connect(gateway.address) as silent, http2.connect(gateway.address) as half:
        half.sendall(http2.PREFACE[:10])
        for connection in (silent, half):
            assert b"handshake timeout" in everything(connection)


def test_a_message_that_never_ends_is_refused_and_its_connection_lives_on(gateway: GatewayProcess) -> None:
    with http2.connect(gateway.address) as connection:
        connection.sendall(http2.headers())
        connection.sendall(http2.frame(http2.DATA, 0, http2.message(bytes(10_000), length=20_000)))
        gateway.wait_until(lambda: gateway.status().arriving_requests == 1)
        received = b""
        while b"did not arrive within 1.5 seconds" not in received:
            part = connection.recv(65_536)
            assert part, "it was hung up on"
            received += part
        assert gateway.status().arriving_requests == 0
        # A second call on it is answered, with the next number of a stream.
        prefill = http2.message(pb.PrefillRequest(token_ids=[1, 2, 3]).SerializeToString())
        connection.sendall(http2.opening(3))
        connection.sendall(http2.frame(http2.DATA, http2.END_STREAM, prefill, stream=3))
        while b"grpc-status\x010" not in received:
            part = connection.recv(65_536)
            assert part, "it was hung up on"
            received += part


def test_of_too_many_connections_the_newest_are_hung_up_on(gateway: GatewayProcess) -> None:
    with ExitStack() as stack:
        before = gateway.connect()
        stack.callback(before.close)
        prefill: Any = before.unary_unary(http2.PREFILL)
        request = pb.PrefillRequest(token_ids=[1]).SerializeToString()
        prefill(request, timeout=TIMEOUT_S)
        gateway.wait_until(lambda: gateway.status().connections == 2)
        many = [stack.enter_context(http2.connect(gateway.address)) for _ in range(3 * CONNECTIONS)]
        for connection in many:
            # They speak, so that nothing but their number is wrong with them.
            connection.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, b"", stream=0))
        gateway.wait_until(lambda: "too many connections" in gateway.log())
        gateway.wait_until(lambda: gateway.status().connections == CONNECTIONS)
        # Who was here before is served.
        prefill(request, timeout=TIMEOUT_S)
    gateway.wait_until(lambda: gateway.status().connections < CONNECTIONS)
    # And who comes when they are gone.
    with closing(gateway.connect()) as channel:
        after: Any = channel.unary_unary(http2.PREFILL)
        after(request, timeout=TIMEOUT_S)


def until(end: threading.Event, message: pb.SessionRequest) -> Iterator[pb.SessionRequest]:
    """One message; the stream stays open."""
    yield message
    end.wait()


def test_more_sessions_than_may_be_open_are_refused(gateway: GatewayProcess) -> None:
    call = pb.SessionCall(tag=1, prefill=pb.PrefillRequest(token_ids=[1]))
    message, end = pb.SessionRequest(calls=[call]), threading.Event()
    sessions = [gateway.stub.Session(until(end, message), timeout=TIMEOUT_S) for _ in range(SESSIONS)]
    for session in sessions:
        assert next(session).results[0].tag == 1
    assert gateway.status().sessions == SESSIONS
    with pytest.raises(grpc.RpcError) as caught:
        next(gateway.stub.Session(iter([message]), timeout=TIMEOUT_S))
    assert client_errors.from_rpc_error(caught.value).reason == "SESSION_LIMIT"
    end.set()
    gateway.wait_until(lambda: gateway.status().sessions == 0)
    assert next(gateway.stub.Session(iter([message]), timeout=TIMEOUT_S)).results[0].tag == 1


def test_status_is_told_when_no_descriptor_is_left(gateway: GatewayProcess) -> None:
    process = psutil.Process(gateway.process.pid)
    known = gateway.status().memory_bytes
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        status = gateway.status()
        assert status.state == pb.SERVER_STATE_SERVING
        assert status.memory_bytes == known > 0, "as it was"
        # Longer than the connections are looked at.
        gateway.wait_until(lambda: gateway.status().uptime.seconds > status.uptime.seconds + 2)
        assert gateway.status().connections >= 1
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, limits)
