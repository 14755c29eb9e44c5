"""AdminService: calls of operators to a running server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
from quire.v1 import admin_pb2, executor_pb2

from service.adapters.loader import AdapterLoader
from service.adapters.registry import Adapters, AdapterVersion
from service.api import validation
from service.api.parsing import parsed
from service.api.server_state import ServerState
from service.auth.authenticator import current_tenant_name
from service.config import Config
from service.errors import InvalidArgument, SeveralGateways
from service.pool.model_versions import WorkerSlot
from service.pool.rolling_restart import RollingRestart
from service.setting_rules import is_private

_POLL_S = 0.02
Context = grpc.aio.ServicerContext[Any, Any]


def is_available(config: Config) -> bool:
    """Whether admin calls are safe to offer: callers are authenticated, or only this machine can connect."""
    has_authentication = bool(config.tokens or config.tls_client_ca)
    return has_authentication or is_private(config.listen)


def check_only_gateway(state: ServerState) -> None:
    """Raises SeveralGateways: a change of one gateway would be lost in most calls."""
    if state.has_other_gateways:
        raise SeveralGateways


class Stop(Protocol):
    """Starts to stop the server."""

    def __call__(self, *, leave_workers: bool) -> None:
        """`leave_workers`: keep them running for the next gateway on the same data directory."""


class RuntimeCalls(Protocol):
    """The calls on runtimes, which are above this package."""

    async def LoadWeights(self, request: admin_pb2.LoadWeightsRequest, context: Context) -> None:
        """Replaces the weights."""

    async def UploadWeights(
        self, requests: AsyncIterator[Any], context: Context
    ) -> admin_pb2.UploadWeightsResponse:
        """Receives weights."""

    async def RebuildSession(
        self, request: admin_pb2.RebuildSessionRequest, context: Context
    ) -> admin_pb2.RebuildSessionResponse:
        """Restarts what a runtime has."""


class AdminApi:
    """Implements the service. A wait ends at the caller's deadline or when the server stops."""

    def __init__(
        self,
        state: ServerState,
        loader: AdapterLoader,
        adapters: Adapters,
        caches_of_versions: Callable[[], Counter[int]],
        stop: Stop,
        restarts: Callable[[], Sequence[RollingRestart]],
        runtimes: RuntimeCalls,
    ) -> None:
        """`caches_of_versions`: the number of caches of each version of an adapter, by its number.

        `restarts`: of each shard that this gateway has now.
        """
        self._state = state
        self._loader = loader
        self._adapters = adapters
        self._caches_of_versions = caches_of_versions
        self._stop = stop
        self._restarts = restarts
        self.LoadWeights = runtimes.LoadWeights
        self.UploadWeights = runtimes.UploadWeights
        self.RebuildSession = runtimes.RebuildSession

    async def Warmup(self, request: admin_pb2.WarmupRequest, _context: Context) -> admin_pb2.WarmupResponse:
        """Waits until workers of this gateway are ready."""
        slots = self._slots()
        if request.workers > len(slots):
            raise InvalidArgument("TOO_MANY_WORKERS", "workers", f"there are {len(slots)} workers")
        # Polling is enough: this call is rare.
        while (ready := self._num_ready()) < (request.workers or len(self._slots())):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return admin_pb2.WarmupResponse(workers_ready=ready)

    def _slots(self) -> list[WorkerSlot]:
        return [slot for restarts in self._restarts() for slot in restarts.slots]

    def _num_ready(self) -> int:
        return sum(slot.state == executor_pb2.WORKER_STATE_READY for slot in self._slots())

    async def Drain(self, request: admin_pb2.DrainRequest, _context: Context) -> admin_pb2.DrainResponse:
        """Replaces workers of this gateway."""
        grace_s = self._state.config.drain_grace_s
        if request.HasField("grace"):
            grace_s = validation.grace_seconds(request.grace)
        known = [slot.worker_id for slot in self._slots()]
        if request.worker_id and request.worker_id not in known:
            problem = f"no worker of this gateway has this id; there are {', '.join(known)}"
            raise InvalidArgument("UNKNOWN_WORKER", "worker_id", problem)
        replaced: list[admin_pb2.ReplacedWorker] = []
        for restarts in self._restarts():
            replaced += await restarts.replace(request.worker_id, grace_s)
        return admin_pb2.DrainResponse(workers=replaced)

    async def LoadAdapter(
        self, requests: AsyncIterator[Any], _context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        """Loads an adapter from a source or from the stream."""
        check_only_gateway(self._state)
        version = await self._loader.load(parsed(requests), current_tenant_name())
        return admin_pb2.LoadAdapterResponse(adapter=self._describe([version])[0])

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, _context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        check_only_gateway(self._state)
        owner = None if request.shared else current_tenant_name()
        return admin_pb2.UnloadAdapterResponse(unloaded=await self._loader.unload(request.adapter_id, owner))

    async def ListAdapters(
        self, _request: admin_pb2.ListAdaptersRequest, _context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        visible = self._adapters.visible_to(current_tenant_name())
        return admin_pb2.ListAdaptersResponse(adapters=self._describe(visible))

    def _describe(self, versions: Sequence[AdapterVersion]) -> list[admin_pb2.Adapter]:
        caches = self._caches_of_versions()
        # Those of the operator's directory are not loaded before a call names them.
        of_workers = [one for slot in self._state.slots for one in slot.snapshot.lora_adapters]
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

    async def Shutdown(
        self, request: admin_pb2.ShutdownRequest, _context: Context
    ) -> admin_pb2.ShutdownResponse:
        """Starts to stop the server."""
        self._stop(leave_workers=request.leave_workers)
        return admin_pb2.ShutdownResponse()
