"""The standard health service, with the call that the library's has no code for."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

# Its types lag behind its messages.
_pb: Any = health_pb2


class HealthApi(health.aio.HealthServicer):
    """Says of services whether they serve; `set` changes it."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, Any] = {}

    async def set(self, service: str, status: Any) -> None:
        """As the library has it."""
        self._told[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        statuses = {name: _pb.HealthCheckResponse(status=status) for name, status in self._told.items()}
        return _pb.HealthListResponse(statuses=statuses)
