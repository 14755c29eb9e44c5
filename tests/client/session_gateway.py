"""A gateway for tests of sessions, whose worker can be made to hold its answers back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire import Client
from quire.v1 import types_pb2

from tests.gateway_process import GatewayProcess


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


def unary_answers(address: str, caller: int, steps: int) -> list[list[int]]:
    """What a loop of unary calls finds, one caller at a time."""
    with Client(address) as client, client.prefill(prompt_of(caller)) as cache:
        return [top_of(cache.decode(token_of(caller, step), output=TOP)) for step in range(steps)]


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
