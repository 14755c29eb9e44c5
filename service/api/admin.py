"""AdminService: calls of operators to a running server."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from quire.v1 import admin_pb2, executor_pb2

from service.api import validation
from service.api.server_state import ServerState
from service.config import Config, is_private
from service.errors import InvalidArgument
from service.pool.rolling_restart import RollingRestart

_POLL_S = 0.02
Context = grpc.aio.ServicerContext[Any, Any]


def is_available(config: Config) -> bool:
    """Whether admin calls are safe to offer: callers are authenticated, or only this machine can connect."""
    has_authentication = bool(config.tokens or config.tls_client_ca)
    return has_authentication or is_private(config.listen)


class Stop(Protocol):
    """Starts to stop the server."""

    def __call__(self, *, leave_workers: bool) -> None:
        """`leave_workers`: keep them running for the next gateway on the same data directory."""


class AdminApi:
    """Implements the service. A wait ends at the caller's deadline or when the server stops."""

    def __init__(self, state: ServerState, restarts: RollingRestart, config: Config, stop: Stop) -> None:
        self._state = state
        self._restarts = restarts
        self._config = config
        self._stop = stop

    async def Warmup(self, request: Message, _context: Context) -> admin_pb2.WarmupResponse:
        """Waits until workers are ready."""
        assert isinstance(request, admin_pb2.WarmupRequest)
        num_workers = len(self._state.slots)
        if request.workers > num_workers:
            raise InvalidArgument("TOO_MANY_WORKERS", "workers", f"there are {num_workers} workers")
        # Polling is enough: this call is rare.
        while self._ready() < (request.workers or num_workers):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return admin_pb2.WarmupResponse(workers_ready=self._ready())

    async def Drain(self, request: Message, _context: Context) -> admin_pb2.DrainResponse:
        """Replaces workers."""
        assert isinstance(request, admin_pb2.DrainRequest)
        grace_s = self._config.drain_grace_s
        if request.HasField("grace"):
            grace_s = validation.grace_seconds(request.grace)
        replaced = await self._restarts.replace(request.worker_id, grace_s)
        response = admin_pb2.DrainResponse()
        for worker in replaced:
            response.workers.add(worker_id=worker.worker_id, old_pid=worker.old_pid, new_pid=worker.new_pid)
        return response

    async def Shutdown(self, request: Message, _context: Context) -> admin_pb2.ShutdownResponse:
        """Starts to stop the server."""
        assert isinstance(request, admin_pb2.ShutdownRequest)
        self._stop(leave_workers=request.leave_workers)
        return admin_pb2.ShutdownResponse()

    def _ready(self) -> int:
        ready = executor_pb2.WORKER_STATE_READY
        return sum(1 for slot in self._state.slots if slot.state == ready)
