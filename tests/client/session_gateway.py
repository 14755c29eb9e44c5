"""A gateway for tests of sessions, whose worker can be made to hold its answers back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.v1 import types_pb2

from tests import undisturbed
from tests.gateway_process import GatewayProcess
from workers.outputs import OutputSpec


def prompt_of(caller: int) -> list[int]:
    """A prompt of 20 tokens that begins like no other caller's."""
    return [(7 * caller + i) % 1000 for i in range(20)]


def token_of(caller: int, step: int) -> int:
    """What a caller appends in a step. The weightless model tells different tokens apart."""
    return (31 * caller + 5 * step) % 1000


TOP = types_pb2.OutputOptions(top_logprobs=3)


def top_of(output: types_pb2.StepOutput) -> list[int]:
    """The likeliest tokens, in order."""
    return list(output.top.token_ids)


def unary_answers(caller: int, steps: int) -> list[list[int]]:
    """What a loop of unary calls has to find, whoever else calls."""
    tokens = [token_of(caller, step) for step in range(steps)]
    found = undisturbed.outputs(prompt_of(caller), tokens, OutputSpec(top_logprobs=3))
    return [list(output.top_ids) for output in found[1:]]


@contextmanager
def held_back(gateway: GatewayProcess) -> Iterator[None]:
    """Inside nothing is computed: calls are taken, and none that needs the worker is answered."""
    (worker,) = gateway.status().workers
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def in_flight(gateway: GatewayProcess, count: int) -> Callable[[], bool]:
    """Whether the gateway has so many operations."""
    return lambda: gateway.status().operations_in_flight == count
