"""Quire as it is used: a gateway and a worker in their own processes, and clients over gRPC in this one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from quire.v1 import executor_pb2

from benchmarks import drivers
from benchmarks.peers.base import PeerConfig, Sample, prompts
from benchmarks.peers.grpc_peer import GrpcPeer


class ServicePeer(GrpcPeer):
    """Greedy, without log-probabilities, every step fenced by its position. Prompts differ."""

    def __init__(self, config: PeerConfig, more_flags: Sequence[str] = ()) -> None:
        flags = [*more_flags, "--threads-per-worker", str(config.threads), "--kv-pages", str(config.kv_pages)]
        super().__init__(config, str(config.model_dir()), flags)
        self._vocab_size = config.shape.vocab_size
        self._callers: list[drivers.Caller] = []

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        own = prompts(self._vocab_size, batch, context_tokens)
        self._callers = self.run(drivers.open_callers(self.stub, own))
        self.run(drivers.batch_step(self.stub, self._callers))
        tokens = [self._callers[0].base_token, self._callers[0].token]
        self.run(drivers.rewind_callers(self.stub, self._callers))
        return tokens

    def decode(self, steps: int, mode: str = "batch") -> Sample:
        before = _step_counts(self.gateway.status().workers[0])
        try:
            sample = self.run(drivers.MODES[mode](self.stub, self._callers, steps))
            after = _step_counts(self.gateway.status().workers[0])
        finally:
            self.run(drivers.rewind_callers(self.stub, self._callers))
        items = after.batch_items - before.batch_items
        sample.more = {"batch": items / max(1, after.steps - before.steps)}
        return sample

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        return self.run(self._prefill(prompts(self._vocab_size, batch, prompt_tokens, seed)))

    def release(self) -> None:
        self.run(drivers.close_callers(self.stub, self._callers))
        self._callers = []

    async def _prefill(self, token_ids: list[list[int]]) -> Sample:
        items = [executor_pb2.PrefillRequest(token_ids=tokens) for tokens in token_ids]
        began_ns = time.perf_counter_ns()
        response = await self.stub.BatchPrefill(executor_pb2.BatchPrefillRequest(items=items))
        ns = time.perf_counter_ns() - began_ns
        for result in response.results:
            if result.HasField("error"):
                raise RuntimeError(f"an item of a batch failed: {result.error.message}")
            cache_id = result.response.kv_cache.cache_id
            await self.stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache_id))
        return Sample([ns], sum(map(len, token_ids)))


def _step_counts(worker: Any) -> Any:
    """Where the checkout has them: the worker's own fields, or a message among them."""
    messages = [worker, *(value for _field, value in worker.ListFields())]
    return next(found for found in messages if hasattr(found, "batch_items"))
