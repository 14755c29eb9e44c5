"""Connections are found among the process's descriptors, and hung up on."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from service.doors.guest_watch import GuestWatch
from service.doors.guests import Guests

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
PATIENCE_S = 30.0


class House:
    """A listening socket with connections to it, both ends of which are in this process."""

    def __init__(self, listen: socket.socket, stack: ExitStack) -> None:
        self.listen = listen
        self._stack = stack
        self.connections: list[tuple[socket.socket, socket.socket]] = []

    def connect(self, count: int) -> None:
        for _ in range(count):
            client = self._stack.enter_context(socket.socket(self.listen.family))
            client.settimeout(PATIENCE_S)
            client.connect(self.listen.getsockname())
            self.connections.append((client, self._stack.enter_context(self.listen.accept()[0])))

    def hung_up_on(self) -> list[int]:
        """Which clients see the end of their connections; the others see what is written to them."""
        ended = []
        for index, (client, accepted) in enumerate(self.connections):
            try:
                accepted.send(b"x")
            except BrokenPipeError:
                assert client.recv(1) == b""
                ended.append(index)
            else:
                assert client.recv(1) == b"x"
        return ended


@contextmanager
def house(kind: str, directory: Path) -> Iterator[tuple[House, str, int]]:
    """With the address as the setting has it, and the port."""
    with ExitStack() as stack:
        if kind == "unix":
            path = str(directory / "socket")
            listen = stack.enter_context(socket.socket(socket.AF_UNIX))
            listen.bind(path)
            listen.listen()
            yield House(listen, stack), f"unix:{path}", 0
        else:
            host = {"tcp": "127.0.0.1", "ipv6": "::1"}[kind]
            family = socket.AF_INET6 if kind == "ipv6" else socket.AF_INET
            listen = stack.enter_context(socket.create_server((host, 0), family=family))
            yield House(listen, stack), f"[{host}]:0", listen.getsockname()[1]


@pytest.mark.parametrize("kind", ["tcp", "ipv6", "unix"])
def test_the_newest_connections_are_hung_up_on(kind: str, tmp_path: Path) -> None:
    with house(kind, tmp_path) as (home, listen, port), house("tcp", tmp_path) as (other, _, _):
        guests = Guests(3)
        with closing(GuestWatch(guests, listen, port)) as watch:
            other.connect(5)
            home.connect(2)
            assert watch.look() == 0 and guests.count == 2, "only those that were accepted here"
            home.connect(4)
            assert watch.look() == 3 and guests.count == 3
            # Which of those that came between two looks was the newest is not known for certain.
            assert len(home.hung_up_on()) == 3 and not {0, 1} & set(home.hung_up_on())
            assert not other.hung_up_on()
            assert watch.look() == 0, "once"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, (path.name for path in Path("/proc/self/fd").iterdir())))
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with suppress(OSError):
                while True:
                    stack.enter_context(socket.socket())
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_works_when_no_descriptor_is_left(tmp_path: Path) -> None:
    with house("tcp", tmp_path) as (home, listen, port):
        guests = Guests(3)
        with closing(GuestWatch(guests, listen, port)) as watch:
            home.connect(2)
            assert watch.look() == 0
            home.connect(4)
            with no_descriptors():
                assert watch.look() == 3
            assert len(home.hung_up_on()) == 3 and not {0, 1} & set(home.hung_up_on())
