"""The socket of a worker: who has not its secret, or does not keep to the protocol, changes nothing."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from quire.v1 import worker_pb2

from workers import socket_server
from workers.common.message_stream import MessageStream
from workers.executors.weightless import PagedAttentionExecutor
from workers.scheduler import Scheduler
from workers.server import WorkerServer

LENGTH = struct.Struct("<I")
SECRET = "opensesame"
MAX_BYTES = 1 << 16
# Far more than anything takes.
PATIENCE_S = 30
Responses: TypeAlias = MessageStream[worker_pb2.ConnectResponse]


class Peer:
    """A connection to the worker."""

    def __init__(
        self, transport: asyncio.Transport, stream: MessageStream[worker_pb2.ConnectResponse]
    ) -> None:
        self.transport, self.stream = transport, stream

    async def send(self, **fields: Any) -> None:
        await self.stream.write(worker_pb2.ConnectRequest(**fields))

    async def next(self, kind: str) -> worker_pb2.WorkerEvent:
        async with asyncio.timeout(PATIENCE_S):
            async for message in self.stream:
                for event in message.events:
                    if event.WhichOneof("event") == kind:
                        return event
        raise AssertionError(kind)

    async def is_closed(self) -> bool:
        """Waits until it is, without having been sent anything."""
        async with asyncio.timeout(PATIENCE_S):
            return not [message async for message in self.stream]


class Socket:
    """A worker in this process, behind its socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.executor = PagedAttentionExecutor.create(kv_pages=8)
        self.worker = WorkerServer(lambda _: self.executor, lambda _: Scheduler(16, 16, max_rows=16))
        self.peers: list[Peer] = []

    async def connect(self) -> Peer:
        loop = asyncio.get_running_loop()
        stream = MessageStream(worker_pb2.ConnectResponse, MAX_BYTES)
        transport, _ = await loop.create_unix_connection(lambda: stream, self.path)
        self.peers.append(Peer(transport, stream))
        return self.peers[-1]

    async def serving(self) -> Peer:
        """A gateway that is served."""
        peer = await self.connect()
        await peer.send(secret=SECRET)
        await peer.next("ready")
        return peer


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[Socket]:
    made = Socket(str(tmp_path / "s"))
    server = await socket_server.listen(made.path, SECRET, made.worker, MAX_BYTES)
    made.worker.start()
    yield made
    server.close()
    for peer in made.peers:
        peer.stream.close()
    made.worker.stop(5)


def snapshot(op_id: int) -> list[worker_pb2.WorkerCommand]:
    return [worker_pb2.WorkerCommand(op_id=op_id, snapshot=worker_pb2.SnapshotCommand())]


async def is_served(peer: Peer, op_id: int) -> bool:
    await peer.send(commands=snapshot(op_id))
    while (event := await peer.next("snapshot")).op_id != op_id:
        pass
    return bool(event)


@pytest.mark.parametrize(
    "first",
    [
        worker_pb2.ConnectRequest(),
        worker_pb2.ConnectRequest(secret="opensesamE"),
        worker_pb2.ConnectRequest(secret="\u00e9"),
        worker_pb2.ConnectRequest(commands=snapshot(1)),
        worker_pb2.ConnectRequest(secret=SECRET + "x" * 4096),
    ],
    ids=["none", "wrong", "not ASCII", "a command", "long"],
)
async def test_who_has_not_the_secret_is_sent_away(socket: Socket, first: worker_pb2.ConnectRequest) -> None:
    gateway, stranger = await socket.serving(), await socket.connect()
    await stranger.stream.write(first)
    assert await stranger.is_closed()
    assert await is_served(gateway, 2)


async def test_what_is_no_message_is_sent_away(socket: Socket) -> None:
    gateway, stranger = await socket.serving(), await socket.connect()
    stranger.transport.write(LENGTH.pack(3) + b"\xff\xff\xff")
    assert await stranger.is_closed()
    assert await is_served(gateway, 2)


async def test_who_says_nothing_is_sent_away(socket: Socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "_FIRST_TIMEOUT_S", 0.01)
    gateway, silent = await socket.serving(), await socket.connect()
    slow = await socket.connect()
    slow.transport.write(LENGTH.pack(10))
    assert await silent.is_closed() and await slow.is_closed()
    assert await is_served(gateway, 2)


async def test_a_pause_of_the_worker_does_not_count_against_its_gateway(
    socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the connection and its first message."""
    monkeypatch.setattr(socket_server, "_FIRST_TIMEOUT_S", 1.0)
    gateway = await socket.connect()
    # It is accepted.
    await asyncio.sleep(0.05)
    await gateway.send(secret=SECRET)
    time.sleep(1.1)  # noqa: ASYNC251 - the pause
    monkeypatch.setattr(socket_server, "_FIRST_TIMEOUT_S", 60.0)
    await gateway.next("ready")


@pytest.mark.parametrize("cut", [1, LENGTH.size, LENGTH.size + 1])
async def test_a_connection_that_ends_within_a_message_ends_the_stream(socket: Socket, cut: int) -> None:
    gateway = await socket.serving()
    gateway.transport.write((LENGTH.pack(2) + b"\x0a\x00")[:cut])
    gateway.transport.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        # Without an orphan timer it ends with its stream.
        await socket.worker.ended


async def test_a_message_beyond_the_bound_ends_the_stream(socket: Socket) -> None:
    gateway = await socket.serving()
    gateway.transport.write(LENGTH.pack(MAX_BYTES + 1))
    async with asyncio.timeout(PATIENCE_S):
        await socket.worker.ended
