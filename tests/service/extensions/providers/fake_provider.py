"""A fake provider over real HTTP sockets. A test scripts each reply, including faults."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import runner_pb2

from service.caches.tenants import Tenant
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.runtime import RemoteRuntime
from service.extensions.providers.spending import Spending
from service.runtimes.base import Batch, Runtime
from tests.error_details import status_reason

# Writes a response; returns whether the connection stays open for another.
Reply = Callable[[asyncio.StreamWriter], Awaitable[bool]]
EVENT_STREAM = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
)


@dataclass
class Asked:
    """A received request."""

    target: str
    headers: dict[str, str]
    body: Any


class FakeProvider:
    """Answers each request with the next reply of the script, then repeats the last one."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self.script: deque[Reply] = deque()
        self.asked: list[Asked] = []
        self.connections = 0
        self.open = 0
        self.port = 0
        # Set when a client disconnected before its response was complete.
        self.left = asyncio.Event()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request, *lines = head.split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.asked.append(Asked(request.split(" ")[1], headers, json.loads(body)))
        reply = self.script.popleft() if len(self.script) > 1 else self.script[0]
        replying = asyncio.ensure_future(reply(writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([replying, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        # Whichever of the two was the first to notice it.
        if not replying.done() or isinstance(replying.exception(), ConnectionError):
            self.left.set()
            replying.cancel()
            return False
        await asyncio.gather(leaving, return_exceptions=True)
        await writer.drain()
        return replying.result()


@asynccontextmanager
async def fake_provider(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeProvider]:
    provider = FakeProvider("http" if tls is None else "https")
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(provider.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    provider.port = server.sockets[0].getsockname()[1]
    try:
        yield provider
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Replies.


def raw(*pieces: bytes, pause_s: float = 0.0, stays: bool = False) -> Reply:
    """Writes bytes, with pauses between the pieces, and closes unless it stays open."""

    async def reply(writer: asyncio.StreamWriter) -> bool:
        for index, piece in enumerate(pieces):
            if index:
                await writer.drain()
                await asyncio.sleep(pause_s)
            writer.write(piece)
        return stays

    return reply


def stalled(*pieces: bytes) -> Reply:
    """Writes bytes, then hangs."""

    async def reply(writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        return await asyncio.Event().wait()

    return reply


def status(code: int, body: object = None, headers: str = "") -> Reply:
    """A complete response with another status."""
    text = (body if isinstance(body, str) else json.dumps(body)).encode()
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n{headers}\r\n"
    return raw(head.encode() + text)


def event(data: object) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def delta(text: str = "", sample: int = 0, finish: str | None = None, **more: object) -> dict[str, object]:
    """An event of the chat dialect."""
    return {"choices": [{"index": sample, "delta": {"content": text, **more}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}


def stream(*events: object, done: bool = True) -> Reply:
    """A complete response of OpenAI's dialects."""
    pieces = [event(said) for said in events] + ([event("[DONE]")] if done else [])
    return raw(EVENT_STREAM.encode() + b"".join(pieces))


def said(*texts: str) -> Reply:
    """A successful response of the chat dialect."""
    return stream(*(delta(text) for text in texts), delta(finish="stop"), USAGE)


# The client side.


class Collected:
    """A ChunkSink that keeps all chunks."""

    def __init__(self) -> None:
        self.chunks: list[runner_pb2.SampleChunk] = []
        self.is_full = False
        self.first = asyncio.Event()

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        self.chunks += chunks
        self.first.set()

    async def wait_for_room(self) -> None:
        if self.is_full:
            # For ever.
            await asyncio.Event().wait()

    def on_release(self, callback: Callable[[], None]) -> None:
        pass

    def of(self, item_id: str = "a", sample: int = 0) -> list[runner_pb2.SampleChunk]:
        return [chunk for chunk in self.chunks if (chunk.item_id, chunk.sample) == (item_id, sample)]

    def text(self, item_id: str = "a", sample: int = 0) -> str:
        return "".join(chunk.text for chunk in self.of(item_id, sample))

    def last(self, item_id: str = "a", sample: int = 0) -> runner_pb2.SampleChunk:
        """The last chunk of a sample, which must have ended."""
        chunks = self.of(item_id, sample)
        assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert [chunk.position for chunk in chunks] == list(range(len(chunks)))
        return chunks[-1]


@dataclass
class VirtualTime:
    """A clock that `sleep` advances without waiting."""

    now_s: float = 1000.0
    slept: list[float] = field(default_factory=list)

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        # Always the largest random number.
        return Clock(
            now_s=lambda: self.now_s,
            wall_s=lambda: 999_999_000.0 + self.now_s,
            sleep=self.sleep,
            uniform=lambda _, most: most,
        )


def config(at: FakeProvider, **changes: Any) -> ProviderConfig:
    settings = {"name": "there", "dialect": "openai-chat", "base_url": at.url, "model": "m"}
    return ProviderConfig(**{**settings, **changes})


def item(text: str = "Hello", item_id: str = "a", **fields: Any) -> runner_pb2.ExecuteItem:
    return runner_pb2.ExecuteItem(item_id=item_id, text=text, **fields)


async def run(
    runtime: Runtime,
    *items: runner_pb2.ExecuteItem,
    deadline_s: float | None = None,
    tenant: Tenant | None = None,
) -> Collected:
    """Runs a batch to its end."""
    sink = Collected()
    batch = Batch(key="k", tenant=tenant, items=items, deadline_s=deadline_s)
    await runtime.execute(batch, sink)
    return sink


@asynccontextmanager
async def remote(
    made: ProviderConfig, time: VirtualTime | None = None, spending: Spending | None = None
) -> AsyncIterator[RemoteRuntime]:
    runtime = RemoteRuntime(made, time.clock() if time else None, spending)
    try:
        yield runtime
    finally:
        await runtime.close()


async def answered(
    at: FakeProvider,
    *items: runner_pb2.ExecuteItem,
    time: VirtualTime | None = None,
    deadline_s: float | None = None,
    tenant: Tenant | None = None,
    **settings: Any,
) -> Collected:
    """Runs a batch on a new runtime."""
    async with remote(config(at, **settings), time) as runtime:
        return await run(runtime, *items, deadline_s=deadline_s, tenant=tenant)


def reason(chunk: runner_pb2.SampleChunk) -> str:
    """The reason why a sample failed; empty: it did not."""
    if chunk.finish_reason != runner_pb2.FINISH_REASON_ERROR:
        return ""
    return status_reason(chunk.error)
