"""Loads of callers over the API: what a client's decoding loop does, and nothing else.

Each driver decodes greedily and says how long it took. A new way to call is a new driver here, an entry in
`MODES`, and the workloads' entries that name it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks.peers.base import SETTLING_STEPS, Sample, Unavailable

# In the stubs of the stubs only, not at run time.
Stub: TypeAlias = "executor_pb2_grpc.ModelExecutorServiceAsyncStub"


@dataclass(slots=True)
class Caller:
    """One sequence as its caller knows it. `base_*` is where a turn begins."""

    cache_id: str
    base_len: int
    base_token: int
    seq_len: int = 0
    token: int = 0

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        """Back to the beginning of a turn."""
        self.seq_len, self.token = self.base_len, self.base_token

    def request(self) -> executor_pb2.DecodeRequest:
        """The next step: appends the token that the last one chose, fenced."""
        return executor_pb2.DecodeRequest(cache_id=self.cache_id, token_id=self.token, position=self.seq_len)

    def took(self, response: executor_pb2.DecodeResponse) -> None:
        """The step was answered."""
        # Counted and not read: the echo server's answer is always the same.
        self.seq_len += 1
        self.token = response.output.token_id


async def open_callers(stub: Stub, prompts: Sequence[Sequence[int]]) -> list[Caller]:
    """A cache for each prompt, one after the other."""
    callers = []
    for prompt in prompts:
        response = await stub.Prefill(executor_pb2.PrefillRequest(token_ids=prompt))
        callers.append(Caller(response.kv_cache.cache_id, len(prompt), response.output.token_id))
    return callers


async def rewind_callers(stub: Stub, callers: Sequence[Caller]) -> None:
    """Cuts every cache back to where a turn begins."""
    for caller in callers:
        request = executor_pb2.TruncateKVRequest(cache_id=caller.cache_id, new_len=caller.base_len)
        await stub.TruncateKV(request)
        caller.rewind()


async def close_callers(stub: Stub, callers: Sequence[Caller]) -> None:
    """Releases every cache."""
    for caller in callers:
        await stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=caller.cache_id))


async def batch_step(stub: Stub, callers: Sequence[Caller]) -> None:
    """One BatchDecode of all callers. Raises RuntimeError if an item fails."""
    request = executor_pb2.BatchDecodeRequest(items=[caller.request() for caller in callers])
    response = await stub.BatchDecode(request)
    for caller, result in zip(callers, response.results, strict=True):
        if result.HasField("error"):
            raise RuntimeError(f"an item of a batch failed: {result.error.message}")
        caller.took(result.response)


async def batch(stub: Stub, callers: Sequence[Caller], steps: int) -> Sample:
    """One caller who has all sequences, and steps them together."""
    for _ in range(SETTLING_STEPS):
        await batch_step(stub, callers)
    ns = []
    for _ in range(steps):
        began_ns = time.perf_counter_ns()
        await batch_step(stub, callers)
        ns.append(time.perf_counter_ns() - began_ns)
    return Sample(ns, len(callers))


async def unary(stub: Stub, callers: Sequence[Caller], steps: int, concurrency: int = 0) -> Sample:
    """Callers who know nothing of each other: `concurrency` loops of Decode, by default one a sequence.

    Loops that have several sequences take turns with them. The sample is one mean: see `rate`.
    """
    loops = concurrency or len(callers)

    async def loop(own: Sequence[Caller], done: list[tuple[int, int]]) -> None:
        for _ in range(SETTLING_STEPS + steps):
            for caller in own:
                began_ns = time.perf_counter_ns()
                caller.took(await stub.Decode(caller.request()))
                done.append((began_ns, time.perf_counter_ns()))

    calls: list[list[tuple[int, int]]] = [[] for _ in range(loops)]
    async with asyncio.TaskGroup() as group:
        for index in range(loops):
            group.create_task(loop(callers[index::loops], calls[index]))
    return rate(calls, len(callers))


async def session(stub: Stub, callers: Sequence[Caller], steps: int) -> Sample:
    """Callers who know nothing of each other, each with a Session. Raises Unavailable."""
    del stub, callers, steps
    methods = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].methods_by_name
    if "Session" not in methods:
        raise Unavailable("Session is not part of the API yet")
    raise Unavailable("the suite has no driver for Session yet (benchmarks/drivers.py)")


def rate(calls: Sequence[Sequence[tuple[int, int]]], tokens: int) -> Sample:
    """The mean time of `tokens` calls while all loops were busy, from each call's (begin, end) in ns.

    Counted from when the last loop has had its first answer until the first loop has had its last, since
    before and after fewer callers share the steps.
    """
    begin_ns = max(loop[0][1] for loop in calls)
    end_ns = min(loop[-1][1] for loop in calls)
    counted = [call for loop in calls for call in loop if begin_ns < call[1] <= end_ns]
    if not counted:
        raise RuntimeError("the loops were never busy at the same time: give them more steps")
    latency_ns = [ended_ns - began_ns for began_ns, ended_ns in counted]
    return Sample([(end_ns - begin_ns) * tokens // len(counted)], tokens, latency_ns)


Driver = Callable[[Stub, Sequence[Caller], int], Awaitable[Sample]]
MODES: dict[str, Driver] = {"batch": batch, "unary": unary, "session": session}
