"""Connections are counted among the process's descriptors. tests/e2e/test_bounds.py has their limit."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
import structlog
from quire import Client
from quire.v1 import runner_pb2, runner_pb2_grpc

from service.auth.connections import TooFewDescriptors, server_options, with_descriptors
from service.config import Config


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
