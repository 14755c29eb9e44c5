"""The calls on a Session when its stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire.v1 import executor_pb2

from service.cli.load.session_calls import STREAM_ENDED, CallFailed, SessionCalls


class EndingStream:
    """Answers the calls of one message and ends. As gRPC does, it goes on reading what there is to send."""

    def __init__(self, requests: AsyncIterator[executor_pb2.SessionRequest], answers: bool) -> None:
        self._answers = answers
        self._sent: asyncio.Queue[executor_pb2.SessionRequest] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(requests))

    async def _read(self, requests: AsyncIterator[executor_pb2.SessionRequest]) -> None:
        # A stream has to begin before it sends.
        for _ in range(3):
            await asyncio.sleep(0)
        async for request in requests:
            self._sent.put_nowait(request)

    async def __aiter__(self) -> AsyncIterator[executor_pb2.SessionResponse]:
        request = await self._sent.get()
        if self._answers:
            decoded = executor_pb2.DecodeResponse()
            results = [executor_pb2.SessionResult(tag=call.tag, decode=decoded) for call in request.calls]
            yield executor_pb2.SessionResponse(results=results)

    def cancel(self) -> None:
        self._reader.cancel()


class Stub:
    """Its first stream answers nothing, all others do."""

    def __init__(self) -> None:
        self.streams: list[EndingStream] = []

    def Session(self, requests: AsyncIterator[Any], metadata: object) -> EndingStream:
        self.streams.append(EndingStream(requests, answers=bool(self.streams)))
        return self.streams[-1]


async def test_a_stream_that_ended_fails_its_calls_and_is_opened_anew() -> None:
    stub: Any = Stub()
    calls = SessionCalls(stub, (), None, 100)
    request = executor_pb2.DecodeRequest(cache_id="c")
    with pytest.raises(CallFailed) as failed:
        await calls.decode(request)
    assert failed.value.reason == STREAM_ENDED
    for _ in range(2):
        async with asyncio.timeout(30):
            await calls.decode(request)
        # The stream ends behind the answer.
        await asyncio.sleep(0)
    assert len(stub.streams) >= 2
    for stream in stub.streams:
        stream.cancel()
    await calls.close()
