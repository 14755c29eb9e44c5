"""Quire as it is used: a gateway and a worker in their own processes, and clients over gRPC in this one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
import uvloop
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks import drivers
from benchmarks.gateway_process import GatewayProcess, channel_options
from benchmarks.peers.base import Peer, PeerConfig, Sample, prompts
from benchmarks.shapes import SHAPES

_Result = TypeVar("_Result")


class ServicePeer(Peer):
    """Greedy, without log-probabilities, every step fenced by its position. Prompts differ."""

    def __init__(self, config: PeerConfig) -> None:
        self._vocab_size = SHAPES[config.shape].vocab_size
        self._gateway = GatewayProcess(
            str(config.model_dir), threads=config.threads, kv_pages=config.kv_pages
        )
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stub: drivers.Stub = self._run(self._connect())
        self._callers: list[drivers.Caller] = []

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("quire-server", "grpcio", "protobuf", "uvloop")}

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        own = prompts(self._vocab_size, batch, context_tokens)
        self._callers = self._run(drivers.open_callers(self._stub, own))
        self._run(drivers.batch_step(self._stub, self._callers))
        tokens = [self._callers[0].base_token, self._callers[0].token]
        self._run(drivers.rewind_callers(self._stub, self._callers))
        return tokens

    def decode(self, steps: int, mode: str = "batch") -> Sample:
        before = self._run(self._worker_status())
        try:
            sample = self._run(drivers.run(mode, self._stub, self._callers, steps))
            after = self._run(self._worker_status())
        finally:
            self._run(drivers.rewind_callers(self._stub, self._callers))
        sample.items_per_step = (after.batch_items - before.batch_items) / max(1, after.steps - before.steps)
        return sample

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        return self._run(self._prefill(prompts(self._vocab_size, batch, prompt_tokens, seed)))

    def release(self) -> None:
        self._run(drivers.close_callers(self._stub, self._callers))
        self._callers = []

    def memory(self) -> dict[str, int]:
        return self._gateway.memory()

    def close(self) -> None:
        self._run(self._channel.close())
        self._runner.close()
        self._gateway.close()

    async def _prefill(self, token_ids: list[list[int]]) -> Sample:
        began_ns = time.perf_counter_ns()
        request = executor_pb2.BatchPrefillRequest(
            items=[executor_pb2.PrefillRequest(token_ids=tokens) for tokens in token_ids]
        )
        response = await self._stub.BatchPrefill(request)
        ns = time.perf_counter_ns() - began_ns
        for result in response.results:
            if result.HasField("error"):
                raise RuntimeError(f"an item of a batch failed: {result.error.message}")
            cache_id = result.response.kv_cache.cache_id
            await self._stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache_id))
        return Sample([ns], sum(map(len, token_ids)))

    async def _worker_status(self) -> executor_pb2.WorkerStatus:
        return (await self._stub.GetStatus(executor_pb2.GetStatusRequest())).workers[0]

    async def _connect(self) -> drivers.Stub:
        # Inside the loop that will use it.
        self._channel = grpc.aio.insecure_channel(self._gateway.address, options=channel_options())
        return executor_pb2_grpc.ModelExecutorServiceStub(self._channel)

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(work)
