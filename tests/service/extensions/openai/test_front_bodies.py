"""Bodies of HTTP requests: what is refused, how much is read, and how much memory all of them take."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from typing import Any

import openai
import pytest
from quire.v1 import runner_pb2

from service.api.request_receiver import RequestReceiver
from service.budgets import Budgets
from service.config import Config
from service.errors import InvalidArgument
from service.extensions.openai.bodies import BodyReader
from service.runtimes.base import Batch, ChunkSink
from tests.service.extensions.openai.served_front import (
    TIMEOUT_S,
    FakeRuntime,
    Waiting,
    generate_yes,
    raw_chat,
    serving,
)
from tests.service.served import turns_of, until


async def test_a_body_of_too_many_values_is_not_parsed() -> None:
    async def parse(data: bytes) -> Any:
        return await reader_of(1 << 24, 1 << 24).parse(bytearray(data))

    text = {"prompt": 'a,[{,"' * 400_000 + "\\"}
    assert await parse(json.dumps(text).encode()) == text, "commas and brackets in strings are no values"
    assert (await turns_of(parse(json.dumps(text).encode())))[1] > 30
    numbers = list(range((1 << 20) - 8))
    assert await parse(json.dumps(numbers).encode()) == numbers
    with pytest.raises(InvalidArgument) as caught:
        await parse(b"[" + b"1," * (1 << 20) + b"1]")
    assert caught.value.reason == "REQUEST_TOO_LARGE"


def reader_of(max_body_bytes: int, max_bytes: int) -> BodyReader:
    config = Config(max_unread_bytes=2 * max_bytes)
    budgets = Budgets.of_server(config)
    return BodyReader(RequestReceiver(config, budgets), max_body_bytes, budgets)


async def test_the_bytes_of_all_bodies_are_limited_until_the_response() -> None:
    runtime = Waiting()
    async with serving(runtime, max_unread_bytes=80_000, max_request_bytes=20_000) as served:
        bodies = served.state.budgets.bodies
        connections = [await served.connect() for _ in range(4)]
        try:
            for index, (_, writer) in enumerate(connections):
                writer.write(raw_chat(user="x" * 12_000))
                await until(lambda index=index: runtime.running == min(index + 1, 3))  # type: ignore[misc]
            reader, _ = connections[3]
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)
            assert answer.startswith(b"HTTP/1.1 429") and b"arriving_full" in answer
            assert b"retry-after" in answer and 36_000 < bodies.used <= 40_000
            runtime.may_continue.set()
            for reader, _ in connections[:3]:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await until(lambda: bodies.used == 0)
        finally:
            for _, writer in connections:
                writer.close()


def refused_status(port: int, path: str, size_bytes: int) -> int:
    """The status that a client gets which sends all of its body before it reads."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, b" " * size_bytes, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_the_settings_of_prompts_count_for_each_until_the_response() -> None:
    held_bytes = []

    async def generate(batch: Batch, sink: ChunkSink) -> None:
        held_bytes.append(bodies.used)
        end: Any = {"text": "yes", "finish_reason": runner_pb2.FINISH_REASON_STOP}
        sink.put([runner_pb2.SampleChunk(item_id=item.item_id, **end) for item in batch.items])

    settings: Any = {"model": "m", "prompt": ["a"] * 100, "extra_body": {"guided_regex": "a" * 500}}
    async with serving(FakeRuntime(generate), max_unread_bytes=400_000) as served, served.client() as client:
        bodies = served.state.budgets.bodies
        assert len((await client.completions.create(**settings)).choices) == 100
        assert held_bytes[0] > 99 * 500
        await until(lambda: bodies.used == 0)
        with bodies.held(180_000), pytest.raises(openai.RateLimitError, match="arriv"):
            await client.completions.create(**settings)
        await until(lambda: bodies.used == 0)
        # More than the limit, with the body: such a request is admitted if it is the only one.
        settings |= {"prompt": ["a"] * 300, "extra_body": {"guided_regex": "a" * 800}}
        assert len((await client.completions.create(**settings)).choices) == 300


async def test_who_is_refused_while_it_still_sends_gets_the_response() -> None:
    """Its connection is not reset, whose buffers take less than this."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=16 << 20) as served:
        for path, status in (("/v1/chat/completions", 413), ("/nothing", 404)):
            assert await asyncio.to_thread(refused_status, served.port, path, 32 << 20) == status
        await until(lambda: not served.front.server.connections)


async def test_of_a_body_without_end_only_so_much_is_read() -> None:
    """Whoever sends it: here one whose path does not exist."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=20_000, message_timeout_s=600) as served:
        _, writer = await served.connect()
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n")
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 64 << 20:
                writer.write(b" " * (1 << 20))
                await asyncio.wait_for(writer.drain(), TIMEOUT_S)
                sent_bytes += 1 << 20
        writer.close()
        assert sent_bytes < 64 << 20, "the buffers of a connection take less"


async def test_who_is_refused_and_never_ends_its_body_does_not_delay_a_shutdown() -> None:
    async with serving(FakeRuntime(generate_yes), message_timeout_s=600) as served:
        reader, writer = await served.connect()
        writer.write(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)).startswith(b"HTTP/1.1 404")
        async with asyncio.timeout(TIMEOUT_S):
            await served.front.stop(600)
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_before_it_has_arrived(is_announced: bool) -> None:
    """Who never sends the rest of it has a connection like one without a request."""
    async with serving(FakeRuntime(generate_yes), max_request_bytes=20_000, message_timeout_s=1) as served:
        reader, writer = await served.connect()
        try:
            head, _, body = raw_chat(user="x" * 30_000).partition(b"\r\n\r\n")
            if is_announced:
                writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
            else:
                head = head[: head.index(b"content-length")] + b"transfer-encoding: chunked"
                writer.write(head + b"\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), TIMEOUT_S)
            assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
            (connection,) = served.front.server.connections
            assert not connection.has_running_request() and served.state.budgets.bodies.used == 0
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        finally:
            writer.close()
