"""What the process has of the system: connections among its descriptors, addresses, and memory."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import structlog
from quire import Client
from quire.v1 import runner_pb2, runner_pb2_grpc

from service import memory
from service.auth.connections import TooFewDescriptors, server_options, with_descriptors
from service.auth.unix_socket import LockedUnixSocket
from service.config import Config
from service.extensions.gateways.parent import reserved
from service.listening import CannotListen, binding, listening_socket
from service.memory import ProcessMemory, keep_trimmed


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
    # Set by a shell: a preexec_fn would fork this process, whose gRPC may be running and then ends the child.
    with_limit = ["sh", "-c", f'ulimit -n {limit}; exec "$0" "$@"']
    done = subprocess.run(
        [*with_limit, sys.executable, "-m", "quire.cli", "serve", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = f"quire: {limit} file descriptors are too few (ulimit -n): max_connections needs 8336\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_the_hard_limit_may_be_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(TooFewDescriptors, match="32 file descriptors are too few"):
        with_descriptors(Config())


def test_one_server_at_a_time_has_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = LockedUnixSocket(str(path))
    with pytest.raises(OSError, match="another process has this address"):
        LockedUnixSocket(str(path))
    first.close()
    assert not any(tmp_path.iterdir()), "nothing is left behind"
    LockedUnixSocket(str(path)).close()


def test_the_unix_socket_of_a_dead_program_is_replaced_but_not_of_a_live_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another process has this address"):
            LockedUnixSocket(str(path))
    assert list(tmp_path.iterdir()) == [path], "it is still there, and no lock file is left"
    LockedUnixSocket(str(path)).close()


async def test_whatever_binds_an_address_says_which_one_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        server = grpc.aio.server()
        for bind in (
            lambda: listening_socket(taken),
            lambda: reserved(taken).__enter__(),
            lambda: server.add_insecure_port(taken),
        ):
            with pytest.raises(CannotListen) as caught, binding(taken):
                bind()
            assert caught.value.listen == taken
            assert caught.value.why.startswith("another process has this address")


MIB = 1 << 20


class Figures(ProcessMemory):
    """Returns the figures one after the other, then always the last."""

    def __init__(self, *figures: int) -> None:
        self._figures = list(figures)

    def resident_bytes(self) -> int:
        return self._figures.pop(0) if len(self._figures) > 1 else self._figures[0]


async def test_without_glibc_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    await asyncio.wait_for(keep_trimmed(Figures(100 * MIB)), 5)


async def test_it_is_trimmed_while_much_more_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    libc = SimpleNamespace(mallopt=lambda *_: 1, malloc_trim=trims.append)
    monkeypatch.setattr(memory, "_glibc", lambda: libc)
    monkeypatch.setattr(memory, "_INTERVAL_S", 0.0)
    figures = Figures(100 * MIB, 110 * MIB, 90 * MIB, 121 * MIB, 122 * MIB, 400 * MIB, 95 * MIB, 95 * MIB)
    running = asyncio.create_task(keep_trimmed(figures))
    while len(figures._figures) > 1:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert len(trims) == 2, "at 122 and at 400 MiB, over the least of 90"
