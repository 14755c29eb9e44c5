"""Loads over the API: the decoding loops of clients, without other work.

Each driver decodes greedily and returns the time that it took. To add a way to call, add a driver here, an
entry in `MODES`, and entries of workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks.peers.base import SETTLING_STEPS, Sample

# In the stubs of the stubs only, not at run time.
Stub: TypeAlias = "executor_pb2_grpc.ModelExecutorServiceAsyncStub"


@dataclass(slots=True)
class Caller:
    """The client's state of one sequence. `base_*` is the state at the beginning of a turn."""

    cache_id: str
    base_len: int
    base_token: int
    seq_len: int = 0
    token: int = 0

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        """Resets to the beginning of a turn."""
        self.seq_len, self.token = self.base_len, self.base_token

    def request(self) -> executor_pb2.DecodeRequest:
        """The next request: appends the token that the last step chose, fenced."""
        return executor_pb2.DecodeRequest(cache_id=self.cache_id, token_id=self.token, position=self.seq_len)

    def took(self, response: executor_pb2.DecodeResponse) -> None:
        """Updates the state after a response."""
        # Count instead of reading seq_len, because the echo server's response is always the same.
        self.seq_len += 1
        self.token = response.output.token_id


async def open_callers(stub: Stub, prompts: Sequence[Sequence[int]]) -> list[Caller]:
    """Creates a cache for each prompt, one after the other."""
    callers = []
    for prompt in prompts:
        response = await stub.Prefill(executor_pb2.PrefillRequest(token_ids=prompt))
        callers.append(Caller(response.kv_cache.cache_id, len(prompt), response.output.token_id))
    return callers


async def rewind_callers(stub: Stub, callers: Sequence[Caller]) -> None:
    """Truncates every cache to the beginning of a turn."""
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
    """One caller with all sequences, which are stepped together."""
    ns = []
    for _ in range(SETTLING_STEPS + steps):
        began_ns = time.perf_counter_ns()
        await batch_step(stub, callers)
        ns.append(time.perf_counter_ns() - began_ns)
    return Sample(ns[SETTLING_STEPS:], len(callers))


async def unary(stub: Stub, callers: Sequence[Caller], steps: int) -> Sample:
    """Independent callers, each in a loop of Decode. Measures one mean: see `rate`."""
    return await _loops([stub.Decode] * len(callers), callers, steps)


async def session(stub: Stub, callers: Sequence[Caller], steps: int) -> Sample:
    """Independent callers, each with its own Session."""
    async with contextlib.AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(SessionLane(stub)) for _ in callers]
        return await _loops(lanes, callers, steps)


async def multiplexed(stub: Stub, callers: Sequence[Caller], steps: int) -> Sample:
    """One Session with all sequences. Each is stepped again as soon as its result arrives."""
    begun: dict[int, int] = {}
    done: list[list[tuple[int, int]]] = [[] for _ in callers]
    async with SessionLane(stub) as lane:
        ready = list(range(len(callers)))
        while begun or ready:
            if ready:
                now_ns = time.perf_counter_ns()
                begun |= dict.fromkeys(ready, now_ns)
                await lane.write({tag: callers[tag].request() for tag in ready})
            ready = []
            for tag, response in await lane.read():
                callers[tag].took(response)
                done[tag].append((begun.pop(tag), time.perf_counter_ns()))
                if len(done[tag]) < SETTLING_STEPS + steps:
                    ready.append(tag)
    return rate(done, len(callers))


class SessionLane:
    """A Session as a context manager."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    async def __aenter__(self) -> Self:
        self._call = self._stub.Session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._call.done_writing()
        if await self._call.read() is not grpc.aio.EOF:
            raise RuntimeError("a Session has answered more than it was asked")

    async def __call__(self, request: executor_pb2.DecodeRequest) -> executor_pb2.DecodeResponse:
        """Runs one step and waits for its result."""
        await self.write({0: request})
        ((_, response),) = await self.read()
        return response

    async def write(self, requests: Mapping[int, executor_pb2.DecodeRequest]) -> None:
        """Sends steps by their tags."""
        calls = [executor_pb2.SessionCall(tag=tag, decode=request) for tag, request in requests.items()]
        await self._call.write(executor_pb2.SessionRequest(calls=calls))

    async def read(self) -> list[tuple[int, executor_pb2.DecodeResponse]]:
        """At least one result. Raises RuntimeError if a step failed or the stream ended."""
        message = await self._call.read()
        if not isinstance(message, executor_pb2.SessionResponse):
            raise RuntimeError("a Session has ended early")  # noqa: TRY004 - the end of a stream has its own type
        for result in message.results:
            if result.HasField("error"):
                raise RuntimeError(f"a step of a Session failed: {result.error.message}")
        return [(result.tag, result.decode) for result in message.results]


_Lane = Callable[[executor_pb2.DecodeRequest], Awaitable[executor_pb2.DecodeResponse]]


async def _loops(lanes: Sequence[_Lane], callers: Sequence[Caller], steps: int) -> Sample:
    """Runs a loop for each caller, on its own connection or Session."""
    settled = asyncio.Barrier(len(callers))

    async def loop(lane: _Lane, caller: Caller, done: list[tuple[int, int]]) -> None:
        for _ in range(SETTLING_STEPS):
            caller.took(await lane(caller.request()))
        await settled.wait()
        for _ in range(steps):
            began_ns = time.perf_counter_ns()
            caller.took(await lane(caller.request()))
            done.append((began_ns, time.perf_counter_ns()))

    calls: list[list[tuple[int, int]]] = [[] for _ in callers]
    async with asyncio.TaskGroup() as group:
        for lane, caller, done in zip(lanes, callers, calls, strict=True):
            group.create_task(loop(lane, caller, done))
    return rate(calls, len(callers))


def rate(calls: Sequence[Sequence[tuple[int, int]]], tokens: int) -> Sample:
    """The mean time of `tokens` calls while all loops were busy, from each call's (begin, end) in ns.

    Counted from when the last loop has had its first answer until the first loop has had its last, since
    before and after fewer callers share the steps. If the loops were so uneven that most calls lie outside,
    all are counted.
    """
    every = [call for loop in calls for call in loop]
    begin_ns = max(loop[0][1] for loop in calls)
    end_ns = min(loop[-1][1] for loop in calls)
    counted = [call for call in every if begin_ns < call[1] <= end_ns]
    if 2 * len(counted) < len(every):
        counted, begin_ns, end_ns = every, min(call[0] for call in every), max(call[1] for call in every)
    latency_ns = [ended_ns - began_ns for began_ns, ended_ns in counted]
    return Sample([(end_ns - begin_ns) * tokens // len(counted)], tokens, latency_ns)


Driver = Callable[[Stub, Sequence[Caller], int], Coroutine[Any, Any, Sample]]
MODES: dict[str, Driver] = {"batch": batch, "unary": unary, "session": session, "multiplexed": multiplexed}
