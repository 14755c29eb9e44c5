"""The server of gRPC, and its standard services: health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from quire.v1 import executor_pb2

from service.api.server_state import ServerState
from service.auth.connections import server_options
from service.config import Config

# Any: its type stubs lag behind its messages.
_pb: Any = health_pb2


def new_server(config: Config, interceptor: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """A server without ports and services."""
    server = grpc.aio.server(interceptors=[interceptor], options=server_options(config))
    # The stubs register each method twice. For methods registered by name, grpcio's asyncio server waits
    # for one task per method with every call: with 35 methods, a quarter of the Python calls of a Decode.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
    return server


class HealthApi(health.aio.HealthServicer):
    """Health checks. All services have the same status."""

    def __init__(self, names: Sequence[str], state: ServerState) -> None:
        super().__init__()
        self._names = names
        self._state = state
        self._status = _pb.HealthCheckResponse.NOT_SERVING
        self._updates: set[asyncio.Task[None]] = set()

    def on_change(self) -> None:
        """The state may have changed. Needs a running event loop."""
        update = asyncio.create_task(self.update())
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def update(self) -> None:
        """Sends the current status to clients that watch it."""
        serves = self._state.state == executor_pb2.SERVER_STATE_SERVING
        self._status = _pb.HealthCheckResponse.SERVING if serves else _pb.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.set(name, self._status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        response = _pb.HealthCheckResponse(status=self._status)
        return _pb.HealthListResponse(statuses=dict.fromkeys(self._names, response))


def methods_of(*protos: Any) -> dict[str, Any]:
    """The descriptors of all methods in generated modules, by the names that a call has for them."""
    return {
        f"/{service.full_name}/{method.name}": method
        for proto in protos
        for service in proto.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Makes `service_names` and their messages discoverable, by reflection v1alpha: the library has no v1."""
    reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME), server)
