"""The calls of AdminService on runtimes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from quire.v1 import admin_pb2

from service.api import admin
from service.api.parsing import parsed
from service.api.server_state import ServerState
from service.errors import BadRuntimes, InvalidArgument
from service.runtimes.router import Router
from service.runtimes.weight_uploads import WeightUploads

_CAUSES = frozenset(admin_pb2.RebuildCause.values())
# Causes of which the server's own workers, or providers, have none.
_OF_WORKERS = admin_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED
_OF_PROVIDERS = admin_pb2.REBUILD_CAUSE_REMOTE_AUTH_FAILURE
_PREVIOUS_CACHES = frozenset(admin_pb2.PreviousCaches.values())
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, eq=False)
class RuntimeCalls:
    """Implements them, as `admin.RuntimeCalls` says."""

    router: Router
    state: ServerState
    # See `RuntimeSource.read_again` of `extension`. None: there is nothing to read.
    read_runtimes: Callable[[str], Awaitable[int]] | None
    uploads: WeightUploads

    async def LoadWeights(self, request: admin_pb2.LoadWeightsRequest, context: Context) -> None:
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
    ) -> admin_pb2.UploadWeightsResponse:
        admin.check_only_gateway(self.state)
        return admin_pb2.UploadWeightsResponse(source=await self.uploads.receive(parsed(requests)))

    async def RebuildSession(
        self, request: admin_pb2.RebuildSessionRequest, context: Context
    ) -> admin_pb2.RebuildSessionResponse:
        if request.cause not in _CAUSES:
            raise InvalidArgument("BAD_CAUSE", "cause", f"cause {request.cause} has no name")
        if request.cause == admin_pb2.REBUILD_CAUSE_REMOTE_CONFIG_CHANGE:
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
        return admin_pb2.RebuildSessionResponse(rebuilt=rebuilt)


def _unfit_cause(request: admin_pb2.RebuildSessionRequest) -> InvalidArgument:
    cause = admin_pb2.RebuildCause.Name(request.cause).removeprefix("REBUILD_CAUSE_")
    which = f"the runtime {request.runtime}" if request.runtime else "the server's own workers"
    return InvalidArgument("BAD_CAUSE", "cause", f"{cause} cannot be a cause for {which}")
