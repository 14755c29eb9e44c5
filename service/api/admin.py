"""AdminService: what operators ask of a running server."""

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
from service.pool.rotation import Rotation

_POLL_S = 0.02
Context = grpc.aio.ServicerContext[Any, Any]


def is_offered(config: Config) -> bool:
    """Whether only those can ask who may: there are doors, or nobody but this machine can connect."""
    has_doors = bool(config.tokens or config.tls_client_ca)
    return has_doors or is_private(config.listen)


class Stop(Protocol):
    """Begins to end the server."""

    def __call__(self, *, leave_workers: bool) -> None:
        """`leave_workers`: to the next gateway on the same data directory."""


class AdminApi:
    """Implements the service. Each wait ends with its caller's deadline, or with the server."""

    def __init__(self, state: ServerState, rotation: Rotation, config: Config, stop: Stop) -> None:
        """`stop` begins to end the server; it is told whether to leave the workers to the next one."""
        self._state = state
        self._rotation = rotation
        self._config = config
        self._stop = stop

    async def Warmup(self, request: Message, _context: Context) -> admin_pb2.WarmupResponse:
        """Waits for workers."""
        assert isinstance(request, admin_pb2.WarmupRequest)
        there = len(self._state.slots)
        if request.workers > there:
            raise InvalidArgument("TOO_MANY_WORKERS", "workers", f"there are {there} workers")
        # Polled: an event for it would be for the sake of one moment.
        while self._ready() < (request.workers or there):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return admin_pb2.WarmupResponse(workers_ready=self._ready())

    async def Drain(self, request: Message, _context: Context) -> admin_pb2.DrainResponse:
        """Replaces workers."""
        assert isinstance(request, admin_pb2.DrainRequest)
        grace_s = self._config.drain_grace_s
        if request.HasField("grace"):
            grace_s = validation.grace_seconds(request.grace)
        replaced = await self._rotation.replace(request.worker_id, grace_s)
        response = admin_pb2.DrainResponse()
        for worker in replaced:
            response.workers.add(worker_id=worker.worker_id, old_pid=worker.old_pid, new_pid=worker.new_pid)
        return response

    async def Shutdown(self, request: Message, _context: Context) -> admin_pb2.ShutdownResponse:
        """Begins to end."""
        assert isinstance(request, admin_pb2.ShutdownRequest)
        self._stop(leave_workers=request.leave_workers)
        return admin_pb2.ShutdownResponse()

    def _ready(self) -> int:
        ready = executor_pb2.WORKER_STATE_READY
        return sum(1 for slot in self._state.slots if slot.state == ready)
