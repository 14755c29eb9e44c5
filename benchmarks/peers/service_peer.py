"""Quire as a service: gateway and worker processes, and gRPC clients in this process."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any

from quire.v1 import executor_pb2

from benchmarks import drivers
from benchmarks.peers.base import PeerConfig, Sample, prompts
from benchmarks.peers.grpc_peer import GrpcPeer

# Tokens of a page of KV.
PAGE_TOKENS = 16


class ServicePeer(GrpcPeer):
    """Greedy, without log-probabilities, every step fenced by its position. Prompts differ."""

    def __init__(self, config: PeerConfig) -> None:
        flags = ["--threads-per-worker", str(config.threads), "--kv-pages", str(config.kv_pages)]
        model = config.gguf_file() if config.quantised else config.model_dir()
        super().__init__(config, str(model), flags)
        self._shape, self._vocab_size = config.shape, config.shape.vocab_size
        # What a step reads is known by the file only if that is quantised.
        self._file_bytes = model.stat().st_size if config.quantised else 0
        self._callers: list[drivers.Caller] = []
        self._prompts: list[list[int]] = []

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        own = self._prompts = prompts(self._vocab_size, batch, context_tokens)
        self._callers = self.run(drivers.open_callers(self.stub, own))
        self.run(drivers.batch_step(self.stub, self._callers))
        tokens = [self._callers[0].base_token, self._callers[0].token]
        self.run(drivers.rewind_callers(self.stub, self._callers))
        return tokens

    def decode(self, steps: int, mode: str = "batch") -> Sample:
        try:
            found = self._counted(drivers.MODES[mode](self.stub, self._callers, steps))
            if self._file_bytes:
                found.bytes_read = self._file_bytes + self._shape.kv_bytes(sum(map(len, self._prompts)))
            return found
        finally:
            self.run(drivers.rewind_callers(self.stub, self._callers))

    def _counted(self, turn: Coroutine[Any, Any, Sample]) -> Sample:
        """A turn, with the mean number of sequences in a step of the worker."""
        before = self.gateway.status().workers[0].counts
        sample = self.run(turn)
        after = self.gateway.status().workers[0].counts
        items = after.batch_items - before.batch_items
        sample.more = {"batch": items / max(1, after.steps - before.steps)}
        return sample

    def prefill(self, batch: int, prompt_tokens: int, seed: int) -> Sample:
        return self.run(self._prefill(prompts(self._vocab_size, batch, prompt_tokens, seed)))

    def held(self) -> dict[str, int]:
        if not self._file_bytes:
            return {}
        pool = self.gateway.stub.GetCacheMetrics(executor_pb2.GetCacheMetricsRequest()).workers[0].pool
        # Pages keep the KV of released sequences; others have not been written.
        written = pool.pages_total - pool.pages_free
        return {"worker": self._file_bytes + self._shape.kv_bytes(written * PAGE_TOKENS)}

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
