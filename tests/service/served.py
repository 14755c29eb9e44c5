"""Model versions, a server's state, a server of calls and an HTTP port, as tests of other parts need them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.adapters.registry import Adapters
from service.api.interceptor import CallInterceptor
from service.api.server_state import ServerState
from service.config import Config
from service.pool.model_versions import ModelVersions, WorkerSlot
from workers.common import worker_pb2

_Result = TypeVar("_Result")


def state_of(config: Config, ready: worker_pb2.WorkerReady | None = None) -> ServerState:
    """A server's state; `ready`: what its worker says, if it is there."""
    versions = ModelVersions("model", 1)
    state = ServerState(config, versions, Adapters(0))
    if ready is not None:
        become_ready(versions, versions.slots[0], ready)
    return state


def become_ready(versions: ModelVersions, slot: WorkerSlot, ready: worker_pb2.WorkerReady) -> None:
    """A worker can serve."""
    slot.ready, slot.state = ready, executor_pb2.WORKER_STATE_READY
    versions.worker_ready(slot)


@contextlib.asynccontextmanager
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


class HttpPort:
    """An HTTP port of a gateway in this process, for who speaks in bytes."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self._tls = tls

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection, whose reader takes little of what is not read."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 10, ssl=self._tls)

    async def send(self, *parts: bytes) -> bytes:
        """Sends bytes, and returns what comes until the connection ends, maybe before they are sent."""
        answer = b""
        async with asyncio.timeout(60):
            reader, writer = await self.connect()
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                while received := await reader.read(1 << 16):
                    answer += received
        writer.close()
        return answer


async def turns_of(work: Coroutine[Any, Any, _Result]) -> tuple[_Result, int]:
    """What it returns, and how often other tasks ran meanwhile."""
    task, turns = asyncio.ensure_future(work), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return task.result(), turns


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
