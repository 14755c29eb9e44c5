"""ModelRunnerService: runs batches on the configured runtimes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from quire.v1 import runner_pb2

from service.api import validation
from service.api.other_shards import OtherShards
from service.api.server_state import ServerState
from service.api.session import write_in_time
from service.api.status import to_status
from service.auth.authenticator import current_tenant
from service.caches.tenants import counted
from service.errors import QuireError
from service.logging import current_request_id
from service.runtimes.base import Runtime
from service.runtimes.embedding import Embedder
from service.runtimes.executions import Executions
from service.runtimes.router import Router

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, eq=False)
class RunnerApi:
    """Implements the service. `others` have the caches of other shards; None: there are none."""

    executions: Executions
    router: Router
    state: ServerState
    embedder: Embedder
    others: OtherShards | None = None

    async def Execute(self, request: runner_pb2.ExecuteRequest, context: Context) -> None:
        if self.others is None or not await self.others.execute(request, context):
            await self.execute_here(request, context)

    async def execute_here(self, request: runner_pb2.ExecuteRequest, context: Context) -> None:
        """Execute, with caches of this shard alone."""
        if self.executions.needs_worker(request):
            await self.state.first_worker(context.time_remaining())
        timeout_s = validation.timeout_seconds(context.time_remaining())
        execution = self.executions.open(request, current_tenant(), timeout_s)
        reader = execution.attach({(at.item_id, at.sample): at.position for at in request.resume_after})
        sent, chunks = runner_pb2.ExecutionStarted(), list[runner_pb2.SampleChunk]()
        try:
            # Most policies choose a runtime within this turn of the loop. Then the first message has it.
            await asyncio.sleep(0)
            while True:
                response = runner_pb2.ExecuteResponse(chunks=chunks)
                if sent != execution.started:
                    sent.CopyFrom(execution.started)
                    response.started.CopyFrom(sent)
                # A reader that does not take it in time is detached.
                stall_s = self.state.config.message_timeout_s
                await write_in_time(context.write(response), stall_s, lambda: execution.detach(reader))
                if not (chunks := await execution.read(reader)):
                    break
        finally:
            execution.detach(reader)

    async def CancelExecution(
        self, request: runner_pb2.CancelExecutionRequest, context: Context
    ) -> runner_pb2.CancelExecutionResponse:
        cancelled = self.executions.cancel(request.request_id, current_tenant())
        if not cancelled and self.others is not None:
            cancelled = await self.others.cancel_execution(request, context)
        return runner_pb2.CancelExecutionResponse(cancelled=cancelled)

    async def ListRuntimes(
        self, request: runner_pb2.ListRuntimesRequest, context: Context
    ) -> runner_pb2.ListRuntimesResponse:
        runtimes = [runtime.describe() for runtime in self.router.runtimes]
        return runner_pb2.ListRuntimesResponse(runtimes=runtimes)

    async def Embed(self, request: runner_pb2.EmbedRequest, context: Context) -> runner_pb2.EmbedResponse:
        return await self.embedder.embed(request, context)

    async def EstimateCost(
        self, request: runner_pb2.EstimateCostRequest, context: Context
    ) -> runner_pb2.EstimateCostResponse:
        self.executions.check_items(request.items)
        wanted = [self.router.named(request.runtime)] if request.runtime else self.router.runtimes
        # It prepares the items, which costs as much as to run the shortest ones.
        with counted(current_tenant(), time.monotonic, len(request.items)):
            return await self._estimate(request.items, wanted)

    async def _estimate(
        self, items: Sequence[runner_pb2.ExecuteItem], wanted: Sequence[Runtime]
    ) -> runner_pb2.EstimateCostResponse:
        estimates: list[runner_pb2.CostEstimate] = []
        errors: list[QuireError] = []
        for runtime in wanted:
            try:
                estimates.append(await runtime.estimate(items))
            except QuireError as error:
                errors.append(error.without_traceback())
                status = to_status(error, current_request_id())
                estimates.append(runner_pb2.CostEstimate(runtime=runtime.name, error=status))
        if len(errors) == len(wanted):
            raise errors[0]
        return runner_pb2.EstimateCostResponse(estimates=estimates)
