"""ModelRunnerService: batches in, streams out, on the runtimes of the configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from quire.v1 import runner_pb2

from service.api import admin, validation
from service.api.reading import is_read
from service.api.server_state import ServerState
from service.api.status import to_status
from service.doors.doors import current_tenant
from service.doors.tokens import Role
from service.errors import InvalidArgument, QuireError, RoleMissing, SlowConsumer
from service.logging import current_request_id
from service.runtimes.execution import Execution, SampleKey
from service.runtimes.executions import Executions
from service.runtimes.router import Router

_CAUSES = frozenset(runner_pb2.RebuildCause.values())
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RunnerApi:
    """Implements the service."""

    def __init__(
        self,
        executions: Executions,
        router: Router,
        state: ServerState,
        read_runtimes: Callable[[str], Awaitable[int]],
    ) -> None:
        """`read_runtimes`: see `RuntimesFile.read_again`."""
        self._executions = executions
        self._router = router
        self._state = state
        self._read_runtimes = read_runtimes

    async def Execute(self, request: runner_pb2.ExecuteRequest, context: Context) -> None:
        if self._executions.needs_worker(request):
            await self._state.first_worker(context.time_remaining())
        timeout_s = validation.timeout_seconds(context.time_remaining())
        execution = self._executions.open(request, current_tenant(), timeout_s)
        reader = execution.attach(_progress(request))
        told, chunks = runner_pb2.ExecutionStarted(), list[runner_pb2.SampleChunk]()
        try:
            # Most policies choose a runtime without waiting for anything: then it is told at once.
            await asyncio.sleep(0)
            while True:
                response = runner_pb2.ExecuteResponse(chunks=chunks)
                if told != execution.started:
                    told.CopyFrom(execution.started)
                    response.started.CopyFrom(told)
                await self._write(context, response, execution, reader)
                if not (chunks := await execution.read(reader)):
                    break
        finally:
            execution.detach(reader)

    async def CancelExecution(
        self, request: runner_pb2.CancelExecutionRequest, context: Context
    ) -> runner_pb2.CancelExecutionResponse:
        cancelled = self._executions.cancel(request.request_id, current_tenant())
        return runner_pb2.CancelExecutionResponse(cancelled=cancelled)

    async def ListRuntimes(
        self, request: runner_pb2.ListRuntimesRequest, context: Context
    ) -> runner_pb2.ListRuntimesResponse:
        runtimes = [runtime.describe() for runtime in self._router.runtimes]
        return runner_pb2.ListRuntimesResponse(runtimes=runtimes)

    async def GetRuntime(
        self, request: runner_pb2.GetRuntimeRequest, context: Context
    ) -> runner_pb2.GetRuntimeResponse:
        return runner_pb2.GetRuntimeResponse(runtime=self._router.named(request.runtime).describe())

    async def EstimateCost(
        self, request: runner_pb2.EstimateCostRequest, context: Context
    ) -> runner_pb2.EstimateCostResponse:
        self._executions.check_items(request.items)
        wanted = [self._router.named(request.runtime)] if request.runtime else self._router.runtimes
        estimates: list[runner_pb2.CostEstimate] = []
        errors: list[QuireError] = []
        for runtime in wanted:
            try:
                estimates.append(await runtime.estimate(request.items))
            except QuireError as error:
                errors.append(error.untraced())
                status = to_status(error, current_request_id())
                estimates.append(runner_pb2.CostEstimate(runtime=runtime.name, error=status))
        if len(errors) == len(wanted):
            raise errors[0]
        return runner_pb2.EstimateCostResponse(estimates=estimates)

    async def LoadWeights(self, request: runner_pb2.LoadWeightsRequest, context: Context) -> None:
        self._check_operator()
        if not request.source:
            raise InvalidArgument("BAD_SOURCE", "source", "a directory or a model's name is needed")
        drain_s = validation.grace_seconds(request.drain) if request.HasField("drain") else 0.0
        runtime = self._router.named(request.runtime)
        async with contextlib.aclosing(runtime.load_weights(request.source, drain_s)) as saying:
            async for said in saying:
                await context.write(said)

    async def RebuildSession(
        self, request: runner_pb2.RebuildSessionRequest, context: Context
    ) -> runner_pb2.RebuildSessionResponse:
        self._check_operator()
        if request.cause not in _CAUSES:
            raise InvalidArgument("BAD_CAUSE", "cause", f"cause {request.cause} has no name")
        if request.cause == runner_pb2.REBUILD_CAUSE_REMOTE_CONFIG_CHANGE:
            rebuilt = await self._read_runtimes(request.runtime)
        else:
            rebuilt = await self._router.named(request.runtime).rebuild_session(request.cause)
        return runner_pb2.RebuildSessionResponse(rebuilt=rebuilt)

    def _check_operator(self) -> None:
        """Where nobody proves who he is, only those on this machine may change what all are served."""
        if not admin.is_offered(self._state.config):
            raise RoleMissing(Role.ADMINISTER.value)

    async def _write(
        self, context: Context, message: runner_pb2.ExecuteResponse, execution: Execution, reader: int
    ) -> None:
        """Writes one message. A reader who does not read it in time is given up."""
        stall_s = self._state.config.session_stall_s
        writing = asyncio.ensure_future(context.write(message))
        try:
            was_read = await is_read(writing, stall_s)
        except asyncio.CancelledError:
            writing.cancel()
            raise
        if not was_read:
            execution.detach(reader)
            # The status is delivered behind it: see Session.
            await writing
            raise SlowConsumer(stall_s)
        await writing


def _progress(request: runner_pb2.ExecuteRequest) -> Mapping[SampleKey, int]:
    return {(at.item_id, at.sample): at.position for at in request.resume_after}
