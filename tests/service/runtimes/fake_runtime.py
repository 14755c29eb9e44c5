"""A runtime that computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.v1 import admin_pb2, runner_pb2

from service.api.status import to_status
from service.errors import QuireError
from service.runtimes.base import Batch, ChunkSink


@dataclass
class FakeRuntime:
    """Puts its name as the text of each sample, except for items that fail."""

    name: str
    failures: Mapping[str, QuireError] = field(default_factory=dict)
    raises: QuireError | None = None
    wait_s: float = 0.0
    cost_usd: float | None = 0.0
    trouble: str = ""
    asked: list[list[str]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def describe(self) -> runner_pb2.Runtime:
        return runner_pb2.Runtime(name=self.name, model_id=f"model of {self.name}", trouble=self.trouble)

    async def execute(self, batch: Batch, sink: ChunkSink) -> None:
        self.asked.append([item.item_id for item in batch.items])
        self.batches.append(batch)
        if self.raises is not None:
            raise self.raises
        for item in batch.items:
            await asyncio.sleep(0)
            error = self.failures.get(item.item_id)
            for sample in range(max(1, item.n)):
                chunk = runner_pb2.SampleChunk(item_id=item.item_id, sample=sample)
                if error is None:
                    chunk.text, chunk.finish_reason = self.name, runner_pb2.FINISH_REASON_STOP
                else:
                    chunk.error.CopyFrom(to_status(error))
                    chunk.finish_reason = runner_pb2.FINISH_REASON_ERROR
                sink.put([chunk])

    async def estimate(self, items: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        for item in items:
            if item.item_id in self.failures:
                raise self.failures[item.item_id]
        return runner_pb2.CostEstimate(runtime=self.name, max_cost_usd=self.cost_usd)

    async def load_weights(
        self, request: admin_pb2.LoadWeightsRequest
    ) -> AsyncGenerator[admin_pb2.LoadWeightsResponse, None]:
        if request.source != "never":
            raise NotImplementedError
        yield admin_pb2.LoadWeightsResponse()

    async def close(self) -> None:
        pass

    async def rebuild_session(self, cause: admin_pb2.RebuildCause) -> int:
        raise NotImplementedError(cause)
