"""Connections that say nothing keep no others out of a port: the oldest of too many are closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.handshakes import HandshakeLimits, Handshakes, Peer, has_spoken

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")


class Port:
    """A listening socket, with both ends of its connections."""

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        self._stack = stack
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = stack.enter_context(socket.create_server((host, 0), family=family))
        self.number: int = self._listening.getsockname()[1]
        self.known: set[Peer] = set()

    def connect(self, source: str | None = None) -> socket.socket:
        """The client's end of a new connection."""
        address = self._listening.getsockname()[:2]
        client = socket.create_connection(address, source_address=None if source is None else (source, 0))
        self._stack.enter_context(client)
        accepted = self._stack.enter_context(self._listening.accept()[0])
        client.setblocking(False)
        self.accepted = accepted
        return client

    def watch(self, most: int = 100, of_address: int = 100, timeout_s: float = 1000.0) -> Handshakes:
        limits = HandshakeLimits(most, of_address, timeout_s)
        return Handshakes(self.number, lambda peer, _: peer in self.known, limits)


@pytest.fixture
def port() -> Iterator[Port]:
    with ExitStack() as stack:
        yield Port(stack)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_all_connections_to_the_port_are_counted(port: Port) -> None:
    """Those of known clients, and of others; not those that were closed."""
    watch = port.watch(most=3)
    clients = [port.connect() for _ in range(2)]
    port.known.add(clients[0].getsockname()[:2])
    for expected in (2, 2):
        assert watch.check() == 0 and watch.count == expected
    clients += [port.connect() for _ in range(3)]
    assert watch.check() == 1 and watch.count == 4
    assert watch.check() == 0 and watch.count == 4


def test_the_oldest_of_too_many_are_closed(port: Port) -> None:
    watch = port.watch(most=3)
    clients = []
    for _ in range(5):
        clients.append(port.connect())
        watch.check()
    assert [is_closed(client) for client in clients] == [True, True, False, False, False]


def test_each_address_has_a_part(port: Port) -> None:
    watch = port.watch(of_address=2)
    other = port.connect("127.0.0.2")
    clients = [port.connect("127.0.0.3") for _ in range(4)]
    assert watch.check() == 2
    assert not is_closed(other) and sum(map(is_closed, clients)) == 2


def test_those_that_are_known_are_left_alone(port: Port) -> None:
    known = port.connect()
    port.known.add(known.getsockname()[:2])
    watch = port.watch(most=1, of_address=1)
    unknown = [port.connect() for _ in range(3)]
    watch.check()
    assert not is_closed(known) and [is_closed(client) for client in unknown] == [True, True, False]
    # It is known for good.
    port.known.clear()
    watch.check()
    assert not is_closed(known)


def test_who_takes_too_long_is_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch, slow = port.watch(timeout_s=10.0), port.connect()
    watch.check()
    now_s += 9
    fast = port.connect()
    watch.check()
    assert not is_closed(slow)
    now_s += 2
    watch.check()
    assert is_closed(slow) and not is_closed(fast)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_has_spoken_is_known(host: str) -> None:
    with ExitStack() as stack:
        port = Port(stack, host)
        watch = Handshakes(port.number, has_spoken, HandshakeLimits(0, 0, 1000.0))
        silent, speaking = port.connect(), port.connect()
        speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert len(port.accepted.recv(100)) == 24
        watch.check()
        assert is_closed(silent) and not is_closed(speaking)
