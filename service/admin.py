"""AdminService: calls of operators to a running server."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from quire.v1 import admin_pb2, executor_pb2

from service.adapters.loader import AdapterLoader
from service.adapters.registry import Adapters, AdapterVersion
from service.api import validation
from service.api.parsing import parsed
from service.api.server_state import ServerState
from service.auth.authenticator import current_tenant_name
from service.completion import wait_until
from service.config import Config
from service.errors import BadRuntimes, InvalidArgument, SeveralGateways
from service.pool.model_versions import WorkerSlot
from service.pool.rolling_restart import RollingRestart
from service.runtimes.router import Router
from service.runtimes.weight_uploads import WeightUploads
from service.setting_rules import is_private

_CAUSES = frozenset(admin_pb2.RebuildCause.values())
# Causes of which the server's own workers, or providers, have none.
_OF_WORKERS = admin_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED
_OF_PROVIDERS = admin_pb2.REBUILD_CAUSE_REMOTE_AUTH_FAILURE
_PREVIOUS_CACHES = frozenset(admin_pb2.PreviousCaches.values())
Context = grpc.aio.ServicerContext[Any, Any]


def is_available(config: Config) -> bool:
    """Whether admin calls are safe to offer: callers are authenticated, or only this machine can connect."""
    has_authentication = bool(config.tokens or config.tls_client_ca)
    return has_authentication or is_private(config.listen)


class Stop(Protocol):
    """Starts to stop the server."""

    def __call__(self, *, leave_workers: bool) -> None:
        """`leave_workers`: keep them running for the next gateway on the same data directory."""


@dataclass(frozen=True, eq=False)
class AdminApi:
    """Implements the service. A wait ends at the caller's deadline or when the server stops."""

    state: ServerState
    loader: AdapterLoader
    adapters: Adapters
    # The number of caches of each version of an adapter, by its number.
    caches_of_versions: Callable[[], Counter[int]]
    stop: Stop
    # The restarts of each shard that this gateway has now.
    restarts: Callable[[], Sequence[RollingRestart]]
    router: Router
    # See `RuntimeSource.read_again` of `extension`. None: there is nothing to read.
    read_runtimes: Callable[[str], Awaitable[int]] | None
    uploads: WeightUploads

    def _check_only_gateway(self) -> None:
        """Raises SeveralGateways: a change of one gateway would be lost in most calls."""
        if self.state.has_other_gateways:
            raise SeveralGateways

    # Workers.

    async def Warmup(self, request: admin_pb2.WarmupRequest, _context: Context) -> admin_pb2.WarmupResponse:
        """Waits until workers of this gateway are ready."""
        if request.workers > (there := len(self._slots())):
            raise InvalidArgument("TOO_MANY_WORKERS", "workers", f"there are {there} workers")
        await wait_until(lambda: self._num_ready() >= (request.workers or len(self._slots())))
        return admin_pb2.WarmupResponse(workers_ready=self._num_ready())

    def _slots(self) -> list[WorkerSlot]:
        return [slot for restarts in self.restarts() for slot in restarts.slots]

    def _num_ready(self) -> int:
        return sum(slot.state == executor_pb2.WORKER_STATE_READY for slot in self._slots())

    async def Drain(self, request: admin_pb2.DrainRequest, _context: Context) -> admin_pb2.DrainResponse:
        grace_s = self.state.config.drain_grace_s
        if request.HasField("grace"):
            grace_s = validation.grace_seconds(request.grace)
        known = [slot.worker_id for slot in self._slots()]
        if request.worker_id and request.worker_id not in known:
            problem = f"no worker of this gateway has this id; there are {', '.join(known)}"
            raise InvalidArgument("UNKNOWN_WORKER", "worker_id", problem)
        replaced: list[admin_pb2.ReplacedWorker] = []
        for restarts in self.restarts():
            replaced += await restarts.replace(request.worker_id, grace_s)
        return admin_pb2.DrainResponse(workers=replaced)

    # Adapters.

    async def LoadAdapter(
        self, requests: AsyncIterator[Any], _context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Loads an adapter from a source or from the stream."""
        self._check_only_gateway()
        version = await self.loader.load(parsed(requests), current_tenant_name())
        return admin_pb2.LoadAdapterResponse(adapter=self._describe([version])[0])

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, _context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        self._check_only_gateway()
        owner = None if request.shared else current_tenant_name()
        return admin_pb2.UnloadAdapterResponse(unloaded=await self.loader.unload(request.adapter_id, owner))

    async def ListAdapters(
        self, _request: admin_pb2.ListAdaptersRequest, _context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        visible = self.adapters.visible_to(current_tenant_name())
        return admin_pb2.ListAdaptersResponse(adapters=self._describe(visible))

    def _describe(self, versions: Sequence[AdapterVersion]) -> list[admin_pb2.Adapter]:
        caches = self.caches_of_versions()
        # Adapters of the operator's directory are only loaded when a call names them.
        of_workers = [one for slot in self.state.slots for one in slot.snapshot.lora_adapters]
        used = {one.version: one for one in of_workers if one.size_bytes}
        return [
            admin_pb2.Adapter(
                adapter_id=version.adapter_id,
                version=version.number,
                pinned=version.pinned,
                shared=version.tenant is None,
                rank=used.get(version.number, version).rank,
                size_bytes=used.get(version.number, version).size_bytes,
                caches=caches[version.number],
            )
            for version in versions
        ]

    # Runtimes.

    async def LoadWeights(self, request: admin_pb2.LoadWeightsRequest, context: Context) -> None:
        self._check_only_gateway()
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
        self._check_only_gateway()
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

    async def Shutdown(
        self, request: admin_pb2.ShutdownRequest, _context: Context
    ) -> admin_pb2.ShutdownResponse:
        self.stop(leave_workers=request.leave_workers)
        return admin_pb2.ShutdownResponse()


def _unfit_cause(request: admin_pb2.RebuildSessionRequest) -> InvalidArgument:
    cause = admin_pb2.RebuildCause.Name(request.cause).removeprefix("REBUILD_CAUSE_")
    which = f"the runtime {request.runtime}" if request.runtime else "the server's own workers"
    return InvalidArgument("BAD_CAUSE", "cause", f"{cause} cannot be a cause for {which}")
