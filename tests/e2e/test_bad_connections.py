"""Connections that speak another protocol than gRPC, or speak it badly."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from quire.v1 import executor_pb2 as pb

from tests.e2e.unharmed import unharmed
from tests.gateway_process import GatewayProcess
from tests.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    connect,
    frame,
    headers,
    message,
)

REQUEST = pb.PrefillRequest(token_ids=[1, 2, 3]).SerializeToString()
NO_SETTINGS = PREFACE + frame(SETTINGS, 0, b"", stream=0)
OTHER_PROTOCOLS = {
    "nothing": b"",
    "http1": b"POST /quire.v1.ModelExecutorService/Prefill HTTP/1.1\r\nContent-Length: 999\r\n\r\nabc",
    "http1 endless": b"GET / HTTP/1.1\r\n" + b"X-Header: value\r\n" * 10_000,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "half a preface": PREFACE[:10],
    "http1 in http2": PREFACE + b"GET / HTTP/1.1\r\n\r\n",
    "bad settings": PREFACE + frame(SETTINGS, 0, b"\xff" * 7, stream=0),
    "data first": NO_SETTINGS + frame(DATA, 0, b"no stream"),
    "bad headers": NO_SETTINGS + frame(HEADERS, END_HEADERS, b"\xff" * 40),
}
BROKEN_FRAMING = (
    frame(DATA, END_STREAM, message(REQUEST, length=2**32 - 1)),
    frame(DATA, END_STREAM, message(REQUEST, compressed=1)),
    frame(DATA, END_STREAM, message(REQUEST, compressed=255)),
    frame(DATA, END_STREAM, b"\x00\x00"),
    frame(DATA, END_STREAM, b""),
    frame(DATA, 0, message(REQUEST)) * 3,
    b"",
)
ODD_HEADERS: tuple[dict[str, str], ...] = (
    {":method": "GET"},
    {":path": "quire"},
    {":scheme": "gopher"},
    {"content_type": "text/html"},
    {"te": "nothing"},
    {"grpc_encoding": "zip"},
    {"grpc_timeout": "soon"},
    {"grpc_timeout": "-1S"},
    {"grpc_status": "0"},
)


@pytest.fixture(autouse=True)
def gateway_goes_on(weightless_gateway: GatewayProcess) -> Iterator[None]:
    with unharmed(weightless_gateway):
        yield


def exchange(gateway: GatewayProcess, data: bytes, until: bytes | None = None) -> bytes:
    """Sends bytes. Everything that comes back: up to and with `until`, or until the server hangs up."""
    received = b""
    with connect(gateway.address) as connection:
        try:
            connection.sendall(data)
            if until is None:
                connection.shutdown(socket.SHUT_WR)
            while (until is None or until not in received) and (part := connection.recv(65_536)):
                received += part
        except TimeoutError:
            raise
        except OSError:
            pass  # It hung up on what it had not read: an answer, too.
    return received


def test_other_protocols_are_hung_up_on(weightless_gateway: GatewayProcess) -> None:
    for name, data in OTHER_PROTOCOLS.items():
        assert b"grpc-status\x010" not in exchange(weightless_gateway, data), name


def test_what_is_no_call_ends_with_its_connection(weightless_gateway: GatewayProcess) -> None:
    rng = random.Random("noise")
    for _ in range(20):
        noise = rng.randbytes(rng.choice((1, 20, 400, 100_000)))
        exchange(weightless_gateway, noise)
        exchange(weightless_gateway, PREFACE + noise)
        exchange(weightless_gateway, headers() + noise)
        exchange(weightless_gateway, headers() + frame(DATA, END_STREAM, noise[:16_000]))
    for body in BROKEN_FRAMING:
        exchange(weightless_gateway, headers() + body)
    for changed in ODD_HEADERS:
        exchange(weightless_gateway, headers(**changed) + frame(DATA, END_STREAM, message(REQUEST)))


@pytest.mark.parametrize("timeout", ["30S", "99999999S", "5000000H", "99999999H"])
def test_every_deadline_that_grpc_can_say_is_taken(weightless_gateway: GatewayProcess, timeout: str) -> None:
    # Go's client says the last of these for a context of 300 years.
    call = headers(grpc_timeout=timeout) + frame(DATA, END_STREAM, message(REQUEST))
    assert b"grpc-status\x010" in exchange(weightless_gateway, call, until=b"grpc-status\x01")
