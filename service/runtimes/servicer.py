"""ModelRunnerService: runs batches on the configured runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from quire.v1 import runner_pb2

from service.api import admin, validation
from service.api.parsing import parsed
from service.api.server_state import ServerState
from service.api.session import write_in_time
from service.api.status import to_status
from service.auth.authenticator import current_tenant
from service.auth.tokens import Role
from service.errors import BadRuntimes, InvalidArgument, QuireError, RoleMissing
from service.logging import current_request_id
from service.runtimes.base import Runtime
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.runtimes.weight_uploads import WeightUploads

_CAUSES = frozenset(runner_pb2.RebuildCause.values())
# Causes of which the server's own workers, or providers, have none.
_OF_WORKERS = runner_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED
_OF_PROVIDERS = runner_pb2.REBUILD_CAUSE_REMOTE_AUTH_FAILURE
_PREVIOUS_CACHES = frozenset(runner_pb2.PreviousCaches.values())
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, eq=False)
class RunnerApi:
    """Implements the service."""

    executions: Executions
    router: Router
    state: ServerState
    # See `RuntimeSource.read_again` of `extension`. None: there is nothing to read.
    read_runtimes: Callable[[str], Awaitable[int]] | None
    uploads: WeightUploads

    async def Execute(self, request: runner_pb2.ExecuteRequest, context: Context) -> None:
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
        return runner_pb2.CancelExecutionResponse(cancelled=cancelled)

    async def ListRuntimes(
        self, request: runner_pb2.ListRuntimesRequest, context: Context
    ) -> runner_pb2.ListRuntimesResponse:
        runtimes = [runtime.describe() for runtime in self.router.runtimes]
        return runner_pb2.ListRuntimesResponse(runtimes=runtimes)

    async def GetRuntime(
        self, request: runner_pb2.GetRuntimeRequest, context: Context
    ) -> runner_pb2.GetRuntimeResponse:
        return runner_pb2.GetRuntimeResponse(runtime=self.router.named(request.runtime).describe())

    async def EstimateCost(
        self, request: runner_pb2.EstimateCostRequest, context: Context
    ) -> runner_pb2.EstimateCostResponse:
        self.executions.check_items(request.items)
        wanted = [self.router.named(request.runtime)] if request.runtime else self.router.runtimes
        tenant, now_s = current_tenant(), time.monotonic()
        # It prepares the items, which costs as much as to run the shortest ones.
        with nullcontext() if tenant is None else tenant.admit_unseen(now_s, len(request.items)):
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

    async def LoadWeights(self, request: runner_pb2.LoadWeightsRequest, context: Context) -> None:
        self._check_operator()
        admin.check_only_gateway(self.state)
        if request.previous_caches not in _PREVIOUS_CACHES:
            why = f"{request.previous_caches} has no name"
            raise InvalidArgument("BAD_PREVIOUS_CACHES", "previous_caches", why)
        if not request.source:
            raise InvalidArgument("BAD_SOURCE", "source", "a directory or a model's name is needed")
        runtime = self.router.named(request.runtime)
        async with contextlib.aclosing(runtime.load_weights(request)) as progress:
            async for response in progress:
                await context.write(response)

    async def UploadWeights(
        self, requests: AsyncIterator[Any], context: Context
    ) -> runner_pb2.UploadWeightsResponse:
        self._check_operator()
        admin.check_only_gateway(self.state)
        return runner_pb2.UploadWeightsResponse(source=await self.uploads.receive(parsed(requests)))

    async def RebuildSession(
        self, request: runner_pb2.RebuildSessionRequest, context: Context
    ) -> runner_pb2.RebuildSessionResponse:
        self._check_operator()
        if request.cause not in _CAUSES:
            raise InvalidArgument("BAD_CAUSE", "cause", f"cause {request.cause} has no name")
        if request.cause == runner_pb2.REBUILD_CAUSE_REMOTE_CONFIG_CHANGE:
            if request.runtime == self.router.runtimes[0].name:
                raise _unfit_cause(request)
            if self.read_runtimes is None:
                raise BadRuntimes("the server was started without one")
            rebuilt = await self.read_runtimes(request.runtime)
        else:
            runtime = self.router.named(request.runtime)
            is_local = runtime is self.router.runtimes[0]
            if request.cause == (_OF_PROVIDERS if is_local else _OF_WORKERS):
                raise _unfit_cause(request)
            rebuilt = await runtime.rebuild_session(request.cause)
        return runner_pb2.RebuildSessionResponse(rebuilt=rebuilt)

    def _check_operator(self) -> None:
        """Without authentication, only clients on this machine may change what all clients get."""
        if not admin.is_available(self.state.config):
            raise RoleMissing(Role.ADMINISTER.value)


def _unfit_cause(request: runner_pb2.RebuildSessionRequest) -> InvalidArgument:
    cause = runner_pb2.RebuildCause.Name(request.cause).removeprefix("REBUILD_CAUSE_")
    which = f"the runtime {request.runtime}" if request.runtime else "the server's own workers"
    return InvalidArgument("BAD_CAUSE", "cause", f"{cause} cannot be a cause for {which}")
