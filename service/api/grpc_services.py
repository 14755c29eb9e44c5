"""The gRPC server, and gRPC's standard services: health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from quire.v1 import executor_pb2

from service.api.server_state import ServerState
from service.auth.connections import server_options
from service.config import Config

# Any: the type stubs lack some of its messages.
_pb: Any = health_pb2
Context = grpc.aio.ServicerContext[Any, Any]


def new_server(config: Config, interceptor: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """Creates a server without ports and services."""
    server = grpc.aio.server(interceptors=[interceptor], options=server_options(config))
    # The stubs register each method twice. For methods registered by name, grpcio's asyncio server waits
    # for one task per method with every call: with 35 methods, a quarter of the Python calls of a Decode.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
    return server


class HealthApi(health_pb2_grpc.HealthServicer):
    """Health checks, which need no token. All services have the same status.

    Not the library's service: there, a client that does not read its Watch blocks the updates of all others.
    """

    def __init__(self, names: Sequence[str], state: ServerState) -> None:
        self._names = names
        self._state = state
        self._changed = asyncio.Event()

    def on_change(self) -> None:
        """Must be called when the state may have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Context) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._status_of(request.service)

    async def Watch(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        last = None
        while True:
            changed, now = self._changed, self._status_of(request.service)
            if now != last:
                yield now
            last = now
            await changed.wait()

    async def List(self, request: Any, context: Context) -> Any:
        return _pb.HealthListResponse(statuses={name: self._status_of(name) for name in self._names})

    def _status_of(self, name: str) -> Any:
        serves = self._state.state == executor_pb2.SERVER_STATE_SERVING
        status = "SERVING" if serves else "NOT_SERVING"
        return _pb.HealthCheckResponse(status=status if name in self._names else "SERVICE_UNKNOWN")


def methods_of(*protos: Any) -> dict[str, Any]:
    """The descriptors of all methods in generated modules, by their full names in calls."""
    return {
        f"/{service.full_name}/{method.name}": method
        for proto in protos
        for service in proto.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Adds reflection for `service_names` and their messages. v1alpha: the library has no v1."""
    reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), server)
