"""Connections are bounded by gRPC, and counted among the process's descriptors."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import structlog

from service.auth.connections import ConnectionCount, server_options
from service.auth.tls import server_credentials
from service.config import Config
from tests import http2
from tests.certificates import Authority

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
PATIENCE_S = 30.0
ALLOWED, TRIED = 5, 50


def listening(kind: str, directory: Path) -> tuple[socket.socket, Config, int]:
    """A listening socket, with the settings and the port of a server that had it."""
    if kind == "unix":
        path = str(directory / "socket")
        listen = socket.socket(socket.AF_UNIX)
        listen.bind(path)
        listen.listen()
        return listen, Config(listen=f"unix:{path}", max_connections=3), 1
    host = {"tcp": "127.0.0.1", "ipv6": "::1"}[kind]
    listen = socket.create_server((host, 0), family=socket.AF_INET6 if kind == "ipv6" else socket.AF_INET)
    return listen, Config(listen=f"[{host}]:0", max_connections=3), listen.getsockname()[1]


def connected(listen: socket.socket, count: int, stack: ExitStack) -> list[socket.socket]:
    """Clients' ends of new connections; both ends are in this process."""
    clients = []
    for _ in range(count):
        clients.append(stack.enter_context(socket.socket(listen.family)))
        clients[-1].connect(listen.getsockname())
        stack.enter_context(listen.accept()[0])
    return clients


@needs_proc
@pytest.mark.parametrize("kind", ["tcp", "ipv6", "unix"])
def test_those_accepted_here_are_counted(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        listen, config, port = listening(kind, tmp_path)
        other, _, _ = listening("tcp", tmp_path)
        stack.enter_context(listen)
        connected(stack.enter_context(other), 5, stack)
        count = ConnectionCount(config)
        count.refresh(port)
        assert count.count == 0
        with ExitStack() as some:
            connected(listen, 2, some)
            count.refresh(port)
            assert count.count == 2
            connected(listen, 4, stack)
            count.refresh(port)
            assert count.count == 6
        count.refresh(port)
        assert count.count == 4


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


@needs_proc
async def test_the_count_goes_on_and_says_once_that_there_are_too_many(tmp_path: Path) -> None:
    with ExitStack() as stack, structlog.testing.capture_logs() as logs:
        listen, config, port = listening("tcp", tmp_path)
        stack.enter_context(listen)
        count = ConnectionCount(config)
        running = asyncio.create_task(count.run(port))

        async def until(wanted: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while count.count != wanted:
                    await asyncio.sleep(0.01)

        connected(listen, 2, stack)
        await until(2)
        with no_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                count.refresh(port)
            assert count.count == 2, "as it was"
        connected(listen, 1, stack)
        await until(3)
        connected(listen, 1, stack)
        await until(4)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert [log["event"] for log in logs] == ["too many connections: further ones are closed"]


class Home:
    """A server of gRPC with the gateway's options, and ways to connect to it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._path = str(directory / "socket")
        self.config = Config(
            listen=f"unix:{self._path}" if kind == "unix" else "127.0.0.1:0", max_connections=ALLOWED
        )
        if kind == "tls":
            pair = Authority(directory / "ca").server()
            self.config = replace(self.config, tls_cert=str(pair.cert), tls_key=str(pair.key))
        self.server = grpc.aio.server(options=server_options(self.config))
        credentials = server_credentials(self.config)
        if credentials is None:
            self.port = self.server.add_insecure_port(self.config.listen)
        else:
            self.port = self.server.add_secure_port(self.config.listen, credentials)

    def connect(self) -> socket.socket:
        """A new connection, which begins to speak. Raises OSError if it is hung up on first."""
        if self._kind == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._path)
        else:
            connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(PATIENCE_S)
        try:
            if self._kind == "tls":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.set_alpn_protocols(["h2"])
                connection = context.wrap_socket(connection)
            connection.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, b"", stream=0))
        except OSError:
            connection.close()
            raise
        return connection

    def served(self, count: int, stack: ExitStack) -> list[socket.socket]:
        """Of so many new connections, one after the other, those that are answered."""
        answered = []
        for _ in range(count):
            with suppress(OSError):
                connection = stack.enter_context(self.connect())
                if connection.recv(1):
                    answered.append(connection)
        return answered


@needs_proc
@pytest.mark.parametrize("kind", ["tcp", "tls", "unix"])
async def test_grpc_serves_as_many_as_are_allowed_and_no_more(kind: str, tmp_path: Path) -> None:
    home = Home(kind, tmp_path)
    await home.server.start()
    count = ConnectionCount(home.config)

    def counted(wanted: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while count.count != wanted:
            assert time.monotonic() < end_s, f"{count.count} connections"
            count.refresh(home.port)
            time.sleep(0.01)

    def check() -> None:
        for _ in range(2):
            with ExitStack() as stack:
                served = home.served(TRIED, stack)
                assert len(served) == ALLOWED
                counted(ALLOWED)
            # There is room again when they have gone.
            counted(0)

    try:
        await asyncio.to_thread(check)
    finally:
        await home.server.stop(0)
