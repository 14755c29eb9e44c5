"""The socket to a worker on this machine."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from quire.v1 import worker_pb2

from service.pool.endpoints import SocketEndpoint

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 16
# Far more than anything takes.
PATIENCE_S = 30


class Worker:
    """The other end, which listens when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self.connected = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connected.set_result((reader, writer))

        self._server = await asyncio.start_unix_server(accept, self.path)

    async def first_request(self) -> worker_pb2.ConnectRequest:
        reader, _ = await self.connected
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return worker_pb2.ConnectRequest.FromString(await reader.readexactly(size))

    async def send(self, data: bytes) -> None:
        (await self.connected)[1].write(data)

    async def end(self) -> None:
        if self.connected.done():
            (await self.connected)[1].transport.abort()
        if self._server is not None:
            self._server.close()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    made = Worker(tmp_path / "s")
    yield made
    await made.end()


async def test_it_waits_until_the_worker_listens_and_shows_the_secret(worker: Worker) -> None:
    endpoint = SocketEndpoint(worker.path, "opensesame")
    opening = asyncio.create_task(endpoint.open(MAX_BYTES, MAX_BYTES))
    await asyncio.sleep(0.1)
    assert not opening.done()
    await worker.listen()
    async with asyncio.timeout(PATIENCE_S):
        await opening
        assert await worker.first_request() == worker_pb2.ConnectRequest(secret="opensesame")
    await endpoint.close()
