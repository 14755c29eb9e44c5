"""Thousands of calls, one in ten cancelled: nothing may be left behind, and no cache has another's tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from tests import undisturbed
from tests.e2e.unharmed import release_all
from tests.gateway_process import GatewayProcess

WARM_UP_CALLS = 400
CALLS = 800
THOROUGH_CALLS = 9_000
CANCELLED_SHARE = 0.1
CONCURRENCY = 24
# Allocators keep some of what peaks need; a leak of one request's state per call would be far more.
MAX_GROWTH_BYTES = 8 << 20


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    flags = ["--kv-pages", "512"]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as process:
        yield process


@dataclass
class Footprint:
    """What a leak would show in."""

    memory_bytes: list[int]
    descriptors: list[int]
    threads: list[int]
    tasks: int

    @classmethod
    def of(cls, gateway: GatewayProcess) -> Footprint:
        status = gateway.status()
        pids = [gateway.process.pid, *(worker.pid for worker in status.workers)]
        processes = [psutil.Process(pid) for pid in pids]
        return cls(
            [p.memory_info().rss for p in processes],
            [p.num_fds() for p in processes],
            [p.num_threads() for p in processes],
            status.tasks,
        )


class Caller:
    """One independent loop of prefill, decodes and release that sometimes loses interest."""

    def __init__(self, stub: executor_pb2_grpc.ModelExecutorServiceAsyncStub, seed: int) -> None:
        self._stub = stub
        self._random = random.Random(seed)
        self.calls = 0
        self.cancelled = 0

    async def run(self, calls: int) -> None:
        while self.calls < calls:
            await self._one_sequence(calls)

    async def _one_sequence(self, calls: int) -> None:
        length = self._random.randint(1, 80)
        prompt = [self._random.randrange(1000) for _ in range(length)]
        answer = await self._call(self._stub.Prefill, pb.PrefillRequest(token_ids=prompt))
        if answer is None:
            return
        handle = answer.kv_cache
        for _ in range(self._random.randint(1, 20)):
            if self.calls >= calls:
                break
            prompt.append(self._random.randrange(1000))
            request = pb.DecodeRequest(cache_id=handle.cache_id, token_id=prompt[-1], position=handle.seq_len)
            decoded = await self._call(self._stub.Decode, request)
            if decoded is None:
                # Cancelled: it was applied or not, and asking again tells.
                decoded = await self._stub.Decode(request, timeout=60)
            answer, handle = decoded, decoded.kv_cache
        assert [answer.output.token_id] == undisturbed.greedy(prompt, 1)
        await self._stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=handle.cache_id), timeout=60)

    async def _call(self, method: Any, request: Any) -> Any:
        """Calls; None if it was cancelled, which some are at a random moment."""
        self.calls += 1
        call = method(request, timeout=60)
        if self._random.random() >= CANCELLED_SHARE:
            return await call
        self.cancelled += 1
        for _ in range(self._random.randint(0, 6)):
            await asyncio.sleep(0)
        if self._random.random() < 0.7:
            await asyncio.sleep(self._random.random() * 0.01)
        call.cancel()
        try:
            return await call
        except asyncio.CancelledError:
            return None


async def make_calls(address: str, calls: int, seed: int) -> int:
    """Runs callers side by side; returns how many calls were cancelled."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        callers = [Caller(stub, seed * 1000 + i) for i in range(CONCURRENCY)]
        await asyncio.gather(*(caller.run(calls // CONCURRENCY) for caller in callers))
        return sum(caller.cancelled for caller in callers)


@pytest.mark.parametrize("calls", [CALLS, pytest.param(THOROUGH_CALLS, marks=pytest.mark.thorough)])
def test_many_calls_with_cancels_leave_nothing_behind(gateway: GatewayProcess, calls: int) -> None:
    asyncio.run(make_calls(gateway.address, WARM_UP_CALLS, seed=1))
    # A Prefill cancelled when its answer was on its way leaves a cache to its lease; nobody holds it.
    release_all(gateway)
    before = Footprint.of(gateway)
    cancelled = asyncio.run(make_calls(gateway.address, calls, seed=2))
    release_all(gateway)
    gateway.assert_pools_are_whole()
    after = Footprint.of(gateway)

    assert cancelled > calls * CANCELLED_SHARE / 2
    assert gateway.status().operations_in_flight == 0
    assert gateway.status().caches == 0
    assert after.descriptors == before.descriptors
    assert after.threads == before.threads
    assert after.tasks <= before.tasks
    for grown, was in zip(after.memory_bytes, before.memory_bytes, strict=True):
        assert grown - was < MAX_GROWTH_BYTES, (before, after)
    print(f"before {before}\nafter  {after}")
