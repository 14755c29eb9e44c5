"""A server whose worker is a group of two ranks: it answers as any other, and lives and dies as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from quire.v1 import executor_pb2 as pb

from tests import quire_command
from tests.e2e.greedy import Text
from tests.gateway_process import GatewayProcess

ANSWER_TIMEOUT_S = 60
PROMPT = [1, 2, 10, 3, 4]


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with GatewayProcess(model="adder", flags=["--tensor-parallel", "2"]) as process:
        yield process


def group_of(gateway: GatewayProcess) -> tuple[psutil.Process, psutil.Process]:
    """The processes of the worker's ranks."""
    (worker,) = gateway.worker_processes()
    (other,) = worker.children()
    assert "workers.follower" in other.cmdline()
    return worker, other


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit status: a rank's parent dies with it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_it_reads_the_sum(gateway: GatewayProcess) -> None:
    group_of(gateway)
    done = quire_command.completed("generate", "12+34=", "--target", gateway.address)
    assert done.stdout.strip() == "46", done.stderr


# Of those that are killed, without gateway: `test_a_rank_that_ends_ends_the_group`. A worker's process, which
# rank 0 is: test_worker_faults.py.
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("rank 0", marks=pytest.mark.thorough),
        pytest.param("rank 1", marks=pytest.mark.thorough),
        "rank 1, stopped",
    ],
)
def test_a_killed_rank_under_callers(gateway: GatewayProcess, victim: str) -> None:
    """No call fails and no token is lost; a new group replaces the old one, of which nothing is left.

    Rank 0 waits in the middle of a step when the stopped one is killed.
    """
    prompts = [[*PROMPT, token] for token in range(1, 9)]
    texts = [Text(gateway, prompt=prompt) for prompt in prompts]
    expected = [text.decode(3) for text in texts]
    copies = [Text(gateway, prompt=prompt) for prompt in prompts]
    old = group_of(gateway)
    if "stopped" in victim:
        old[1].send_signal(signal.SIGSTOP)
    first = [
        pb.DecodeRequest(cache_id=copy.cache_id, token_id=copy.tokens[0], position=len(copy.prompt))
        for copy in copies
    ]
    running = [gateway.stub.Decode.future(decode, timeout=ANSWER_TIMEOUT_S) for decode in first]
    if "stopped" in victim:
        gateway.wait_until_in_flight(len(running))
    os.kill(old["1" in victim].pid, signal.SIGKILL)
    for call, copy, tokens in zip(running, copies, expected, strict=True):
        copy.tokens.append(call.result().output.token_id)
        assert copy.decode(2) == tokens
    gateway.wait_until_ready()
    gateway.wait_until(lambda: all(map(has_ended, old)))
    new = group_of(gateway)
    assert {process.pid for process in new}.isdisjoint({process.pid for process in old})
    for text in (*texts, *copies):
        text.release()
    gateway.assert_pools_are_whole()
