"""A misbehaving Session client, as a process: `python -m benchmarks.bad_callers KIND ADDRESS`.

It prints a line when it has started, runs until its standard input ends, and then prints counters as JSON.
Three kinds are well-behaved, for comparison: one decodes without pauses, one keeps as many calls in flight as
the client allows, and one only uses the CPU, which shows the effect of a busy process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from quire import AsyncClient, AsyncSession
from quire.session import DEFAULT_MAX_IN_FLIGHT
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc, types_pb2

from benchmarks.gateway_process import CHANNEL_OPTIONS

_SESSION = "/quire.v1.ModelExecutorService/Session"
# A stream that accepts no message for this long is full.
_FULL_S = 0.2
# How long a client that reads nothing waits to be cut off.
_STALL_S = 2.0
# How long a client may take to release its caches when it is stopped.
_END_S = 5.0
# Responses of 64 kB, a few of which fill a connection's flow-control window.
_ROWS = 16
_STALLED_CALLS = 64
_FLOOD_CALLS_PER_MESSAGE = 16
_FORWARD = pb.ForwardRequest(token_ids=[1, 2])


@dataclass(slots=True)
class Done:
    """Counters of a client's actions."""

    streams: int = 0
    calls: int = 0


async def flood(address: str, done: Done) -> None:
    """Sends as fast as it can and reads nothing; reopens when the stream is full."""
    stub = _stub(address)
    while True:
        stream = stub.Session()
        done.streams += 1
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for first in itertools.count(step=_FLOOD_CALLS_PER_MESSAGE):
                tags = range(first, first + _FLOOD_CALLS_PER_MESSAGE)
                calls = [pb.SessionCall(tag=tag, forward=_FORWARD) for tag in tags]
                async with asyncio.timeout(_FULL_S):
                    await stream.write(pb.SessionRequest(calls=calls))
                done.calls += len(calls)
        stream.cancel()


async def stall(address: str, done: Done) -> None:
    """Requests large responses and reads none; reopens after it must have been cut off."""
    stub = _stub(address)
    output = types_pb2.OutputOptions(logits=types_pb2.LOGITS_FORMAT_F32)
    request = pb.ForwardRequest(token_ids=range(_ROWS), output=output)
    while True:
        stream = stub.Session()
        done.streams += 1
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            calls = [pb.SessionCall(tag=tag, forward=request) for tag in range(_STALLED_CALLS)]
            await stream.write(pb.SessionRequest(calls=calls))
            done.calls += len(calls)
            await asyncio.sleep(_STALL_S)
        stream.cancel()


async def repeat_tags(address: str, done: Done) -> None:
    """Uses a tag twice, which ends the stream; reopens immediately."""
    stub = _stub(address)
    call = pb.SessionCall(tag=7, forward=_FORWARD)
    while True:
        done.streams += 1
        done.calls += 2
        await _to_the_end(stub.Session(_once(pb.SessionRequest(calls=[call, call]))))


async def garbage(address: str, done: Done) -> None:
    """Sends invalid bytes, which ends the stream; reopens immediately."""
    method: Any = _connect(address).stream_stream(_SESSION, None, None)
    while True:
        done.streams += 1
        await _to_the_end(method(_once(b"\xff" * 64)))


async def half_close(address: str, done: Done) -> None:
    """Opens a stream and half-closes it; reopens immediately."""
    stub = _stub(address)
    while True:
        done.streams += 1
        await _to_the_end(stub.Session(iter(())))


async def decode(address: str, done: Done) -> None:
    """Well-behaved: decodes on one Session, without pauses."""
    async with AsyncClient(address) as client, client.session() as session:
        done.streams += 1
        async with await session.prefill(range(128)) as cache:
            while True:
                await cache.decode(1)
                done.calls += 1
                if cache.seq_len == 512:
                    await cache.truncate(128)


async def pipeline(address: str, done: Done) -> None:
    """Well-behaved, but with a high load: that of `flood`, with the client's limit, and reads the results."""

    async def ask(session: AsyncSession) -> None:
        while True:
            await session.forward([1, 2])
            done.calls += 1

    async with AsyncClient(address) as client, client.session() as session, asyncio.TaskGroup() as group:
        done.streams += 1
        for _ in range(DEFAULT_MAX_IN_FLIGHT):
            group.create_task(ask(session))


async def spin(_: str, __: Done) -> None:
    """Sends nothing, and only uses the CPU."""
    while True:
        until_s = time.monotonic() + 0.01
        while time.monotonic() < until_s:
            pass
        await asyncio.sleep(0)


KINDS: dict[str, Callable[[str, Done], Awaitable[None]]] = {
    "flood": flood,
    "stall": stall,
    "repeat-tags": repeat_tags,
    "garbage": garbage,
    "half-close": half_close,
    "decode": decode,
    "pipeline": pipeline,
    "spin": spin,
}


def _connect(address: str) -> grpc.aio.Channel:
    """Stays open until the process ends."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def _stub(address: str) -> Any:
    return executor_pb2_grpc.ModelExecutorServiceStub(_connect(address))


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


async def _to_the_end(stream: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in stream:
            pass


async def _misbehave(kind: str, address: str) -> None:
    done, began_s = Done(), time.monotonic()
    task = asyncio.ensure_future(KINDS[kind](address, done))
    print("begun", flush=True)
    told_to_end = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({task, told_to_end}, return_when=asyncio.FIRST_COMPLETED)
    seconds = time.monotonic() - began_s
    if task.done():
        task.result()  # It runs forever unless it has failed.
    task.cancel()
    await asyncio.wait({task}, timeout=_END_S)
    print(json.dumps({"seconds": seconds, "streams": done.streams, "calls": done.calls}))


if __name__ == "__main__":
    asyncio.run(_misbehave(*sys.argv[1:]))
