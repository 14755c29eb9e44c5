"""Messages on a socket: whatever the pieces in which their bytes arrive, and however the connection ends."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import pytest
import uvloop
from google.protobuf.message import DecodeError

from workers.common import message_stream, worker_pb2
from workers.common.message_stream import MessageStream, MessageTooLong

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 16
# Far more than anything takes.
PATIENCE_S = 30
Stream: TypeAlias = MessageStream[worker_pb2.AdapterSource]


Test: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def on_each_loop(test: Test) -> Callable[..., None]:
    """Both processes run uvloop; what uses the workers from Python may not."""

    @pytest.mark.parametrize(
        "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    @functools.wraps(test)
    def run(loop: Callable[[], asyncio.AbstractEventLoop], **arguments: object) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(**arguments))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])  # type: ignore[attr-defined]
    return run


def message(size: int) -> worker_pb2.AdapterSource:
    return worker_pb2.AdapterSource(adapter=size, directory="x" * size)


def framed(*messages: worker_pb2.AdapterSource) -> bytes:
    parts = [one.SerializeToString() for one in messages]
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


async def connected(max_bytes: int = MAX_BYTES) -> tuple[Stream, socket.socket]:
    """A stream, and the bytes of its other side."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    stream: Stream = MessageStream(worker_pb2.AdapterSource, max_bytes)
    await asyncio.get_running_loop().create_connection(lambda: stream, sock=ours)
    return stream, theirs


async def received(stream: Stream) -> list[worker_pb2.AdapterSource]:
    async with asyncio.timeout(PATIENCE_S):
        return [one async for one in stream]


@pytest.mark.parametrize("seed", range(6))
@on_each_loop
async def test_messages_are_as_they_were_sent(seed: int) -> None:
    """Short, empty and long ones, cut anywhere, read at any time."""
    chance = random.Random(seed)
    sent = [message(chance.choice([0, 1, 100, 50_000])) for _ in range(30)]
    stream, theirs = await connected()
    data = framed(*sent)

    async def send() -> None:
        at, loop = 0, asyncio.get_running_loop()
        while at < len(data):
            size = chance.choice([1, 2, 3, 5, 1000, 1 << 17])
            await loop.sock_sendall(theirs, data[at : at + size])
            at += size
            await asyncio.sleep(0)
        theirs.close()

    got, _ = await asyncio.gather(received(stream), send())
    assert got == sent


@pytest.mark.parametrize(
    ("rest", "error"),
    [
        (b"", None),
        (LENGTH.pack(5)[:2], None),
        (LENGTH.pack(5) + b"abc", None),
        (LENGTH.pack(MAX_BYTES + 1), MessageTooLong),
        (LENGTH.pack(3) + b"\xff\xff\xff", DecodeError),
    ],
    ids=["between messages", "in a length", "in a message", "too long", "no message"],
)
@on_each_loop
async def test_what_came_before_the_end_is_received(rest: bytes, error: type[Exception] | None) -> None:
    stream, theirs = await connected()
    theirs.sendall(framed(message(1), message(2)) + rest)
    theirs.close()
    assert [await anext(stream), await anext(stream)] == [message(1), message(2)]
    with pytest.raises(error or StopAsyncIteration):
        await asyncio.wait_for(anext(stream), PATIENCE_S)
    stream.close()


@on_each_loop
async def test_the_limit_is_that_of_the_next_message() -> None:
    stream, theirs = await connected(max_bytes=10)
    theirs.sendall(framed(message(1), message(1000)))
    assert await anext(stream) == message(1)
    stream.max_bytes = MAX_BYTES
    assert await anext(stream) == message(1000)
    stream.close()
    theirs.close()


@on_each_loop
async def test_other_tasks_run_between_messages_that_came_together() -> None:
    stream, theirs = await connected()
    theirs.sendall(framed(*[message(1)] * 50))
    theirs.close()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    running = asyncio.create_task(other())
    assert len(await received(stream)) == 50
    assert turns >= 49
    running.cancel()


async def blocked(send: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Sends until nothing more is taken. Returns the task that still does."""

    async def on() -> None:
        while True:
            await send()
            progress.set()

    progress = asyncio.Event()
    task = asyncio.create_task(on())
    while True:
        progress.clear()
        try:
            await asyncio.wait_for(progress.wait(), 0.2)
        except TimeoutError:
            return task


@on_each_loop
async def test_who_does_not_read_stops_who_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions the memory is bounded, and nothing is lost when it goes on."""
    monkeypatch.setattr(message_stream, "_BUFFER_BYTES", 1 << 16)
    stream, theirs = await connected()
    loop = asyncio.get_running_loop()
    sending = await blocked(lambda: loop.sock_sendall(theirs, framed(message(1000))))
    assert len(stream._buffer) < 1 << 20
    for _ in range(300):
        assert await asyncio.wait_for(anext(stream), PATIENCE_S) == message(1000)
    sending.cancel()
    writing = await blocked(lambda: stream.write(message(1000)))
    writing.cancel()
    await asyncio.wait({writing})
    writing = asyncio.create_task(stream.write(message(1000)))
    await asyncio.sleep(0)
    assert not writing.done()

    async def read_on() -> None:
        while True:
            await loop.sock_recv(theirs, 1 << 20)

    reading = asyncio.create_task(read_on())
    await asyncio.wait_for(writing, PATIENCE_S)
    reading.cancel()
    await asyncio.wait({reading})
    writing = await blocked(lambda: stream.write(message(1000)))
    theirs.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(writing, PATIENCE_S)
    with pytest.raises(ConnectionError):
        await stream.write(message(1))


@on_each_loop
async def test_a_side_that_sends_no_more_and_reads_nothing_has_ended() -> None:
    stream, theirs = await connected()
    writing = await blocked(lambda: stream.write(message(1000)))
    theirs.shutdown(socket.SHUT_WR)
    assert await received(stream) == []
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(writing, PATIENCE_S)
    theirs.close()
