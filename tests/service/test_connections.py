"""Connections are counted among the process's descriptors. tests/e2e/test_bounds.py has their limit."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import structlog
from quire import Client
from quire.v1 import runner_pb2, runner_pb2_grpc

from service.auth.connections import ConnectionCount, TooFewDescriptors, server_options, with_descriptors
from service.config import Config
from tests.service.served import until

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")


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

        connected(listen, 2, stack)
        await until(lambda: count.count == 2)
        with no_descriptors():
            with pytest.raises(OSError, match="Too many open files"):
                count.refresh(port)
            assert count.count == 2, "as it was"
        connected(listen, 1, stack)
        await until(lambda: count.count == 3)
        connected(listen, 1, stack)
        await until(lambda: count.count == 4)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert [log["event"] for log in logs] == ["too many connections: further ones are closed"]


class QuietRunner(runner_pb2_grpc.ModelRunnerServiceServicer):
    """Takes long for an answer."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s

    def CancelExecution(
        self, request: runner_pb2.CancelExecutionRequest, context: grpc.ServicerContext
    ) -> runner_pb2.CancelExecutionResponse:
        time.sleep(self._quiet_s)
        return runner_pb2.CancelExecutionResponse(cancelled=True)


@pytest.mark.thorough  # It waits for four pings: twelve seconds.
def test_a_quiet_call_is_not_ended_by_the_pings_of_a_client_of_several_gateways() -> None:
    """Before, the server's limit had a name that gRPC does not know, and the fourth ping was one too many."""
    with ExitStack() as stack:
        addresses = []
        for quiet_s in (12, 0):
            server = grpc.server(ThreadPoolExecutor(1), options=server_options(Config()))
            runner = QuietRunner(quiet_s)  # type: ignore[abstract]
            runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(runner, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            stack.callback(server.stop, None)
        client = stack.enter_context(Client(addresses, timeout_s=120, retries=False))
        assert client.cancel_execution("one")


# The limit of connections follows from the limit of file descriptors.

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "soft", "allowed"),
    [
        ((20_000, 20_000), 4096, 20_000, 4096),
        ((UNLIMITED, UNLIMITED), 4096, UNLIMITED, 4096),
        # The soft limit is increased: room for twice max_connections, and for workers.
        ((1024, 524_288), 4096, 2 * 4096 + 128 + 2 * 16, 4096),
        ((1024, UNLIMITED), 4096, 2 * 4096 + 128 + 2 * 16, 4096),
        ((1024, 5000), 4096, 5000, 4096),
        ((1024, 1024), 4096, 1024, 1024 - 128 - 2 * 16),
        ((1024, 1024), 100, 1024, 100),
        ((100, 100), 4096, 100, 1),
    ],
)
def test_there_are_no_more_connections_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, soft: int, allowed: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: now.append(new))
    with structlog.testing.capture_logs() as logs:
        config = with_descriptors(Config(max_connections=wanted, workers=2))
    assert now[-1] == (soft, limits[1])
    assert config.max_connections == allowed
    assert len(logs) == (allowed < wanted), "it is logged once"


@pytest.mark.parametrize("limit", [20, 12])
def test_with_too_few_the_server_ends_with_one_line(limit: int) -> None:
    """Not with the first error that the lack of descriptors causes."""
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    said = f"quire: {limit} file descriptors are too few (ulimit -n): max_connections needs 8336\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_the_hard_limit_may_be_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(TooFewDescriptors, match="32 file descriptors are too few"):
        with_descriptors(Config())
