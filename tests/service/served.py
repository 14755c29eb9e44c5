"""Model versions, a server's state, and a server of calls, as tests of other parts need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.adapters.registry import Adapters
from service.api.interceptor import CallInterceptor
from service.api.server_state import ServerState
from service.config import Config
from service.pool.model_versions import ModelVersions, WorkerSlot
from workers.common import worker_pb2


def versions_of(model: str = "model", workers: int = 1) -> ModelVersions:
    """One version, whose workers are not there yet."""
    return ModelVersions(model, workers)


def state_of(config: Config, ready: worker_pb2.WorkerReady | None = None) -> ServerState:
    """A server's state; `ready`: what its worker says, if it is there."""
    versions = versions_of()
    state = ServerState(config, versions, Adapters(0))
    if ready is not None:
        become_ready(versions, versions.slots[0], ready)
    return state


def become_ready(versions: ModelVersions, slot: WorkerSlot, ready: worker_pb2.WorkerReady) -> None:
    """A worker can serve."""
    slot.ready, slot.state = ready, executor_pb2.WORKER_STATE_READY
    versions.worker_ready(slot)


@asynccontextmanager
async def channel_to(
    servicer: Any, interceptor: CallInterceptor, *others: Callable[[grpc.aio.Server], object]
) -> AsyncIterator[grpc.aio.Channel]:
    """A client of a server; `others` add further services."""
    server = grpc.aio.server(interceptors=[interceptor])
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(servicer, server)
    for add in others:
        add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
