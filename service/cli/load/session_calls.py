"""One Session stream and the calls on it; those that are made while a message is sent share the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message
from quire.v1 import executor_pb2

from service.cli.channel import status_reason
from service.cli.load.connecting import Metadata, Stub

_TARGET_MESSAGE_BYTES = 1 << 20
STREAM_ENDED = "SESSION_ENDED"


class CallFailed(Exception):
    """The server said no: `reason` is that of its error, or the name of its code."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionCalls:
    """A stream, which is opened with the first call, and anew when it has ended."""

    def __init__(self, stub: Stub, metadata: Metadata, timeout_s: float | None, max_calls: int) -> None:
        """At most `max_calls` go into one message. `timeout_s` bounds each call."""
        self._stub = stub
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._tag = 0
        self._unsent: deque[executor_pb2.SessionCall] = deque()
        self._answers: dict[int, asyncio.Future[executor_pb2.SessionResult]] = {}
        self._news = asyncio.Event()
        self._stream: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def prefill(self, request: executor_pb2.PrefillRequest) -> executor_pb2.PrefillResponse:
        return (await self._call("prefill", request)).prefill

    async def decode(self, request: executor_pb2.DecodeRequest) -> executor_pb2.DecodeResponse:
        return (await self._call("decode", request)).decode

    async def release(self, cache_id: str) -> None:
        await self._call("release_cache", executor_pb2.ReleaseCacheRequest(cache_id=cache_id))

    async def close(self) -> None:
        """Ends the stream, and the calls on it."""
        if self._stream is not None:
            self._stream.cancel()
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=5.0)

    async def _call(self, field: str, request: Message) -> executor_pb2.SessionResult:
        """The answer. Raises CallFailed."""
        if self._reader is None or self._reader.done():
            self._open()
        self._tag += 1
        tag = self._tag
        call = executor_pb2.SessionCall(**{"tag": tag, field: request})  # type: ignore[arg-type]
        if self._timeout_s is not None:
            call.timeout.FromNanoseconds(int(self._timeout_s * 1e9))
        answer: asyncio.Future[executor_pb2.SessionResult] = asyncio.get_running_loop().create_future()
        self._answers[tag] = answer
        self._unsent.append(call)
        self._news.set()
        result = await answer
        if result.WhichOneof("result") == "error":
            raise CallFailed(status_reason(result.error) or grpc_code_name(result.error.code))
        return result

    def _open(self) -> None:
        # Its own: what an earlier stream has not sent is lost, and it may still want to send.
        self._unsent, self._news = deque(), asyncio.Event()
        self._stream = self._stub.Session(self._outgoing(self._unsent, self._news), metadata=self._metadata)
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def _outgoing(
        self, unsent: deque[executor_pb2.SessionCall], news: asyncio.Event
    ) -> AsyncIterator[executor_pb2.SessionRequest]:
        while True:
            while not unsent:
                news.clear()
                await news.wait()
            message, size_bytes = executor_pb2.SessionRequest(), 0
            while unsent and len(message.calls) < self._max_calls:
                size_bytes += unsent[0].ByteSize()
                if message.calls and size_bytes > _TARGET_MESSAGE_BYTES:
                    break
                message.calls.append(unsent.popleft())
            yield message

    async def _read(self) -> None:
        reason = STREAM_ENDED
        try:
            async for message in self._stream:
                for result in message.results:
                    self._answered(result)
        except grpc.aio.AioRpcError as error:
            reason = failure_reason(error)
        except asyncio.CancelledError:
            # The stream was cancelled, or the loop ends; this task ends here either way.
            pass
        finally:
            answers, self._answers = self._answers, {}
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(CallFailed(reason))

    def _answered(self, result: executor_pb2.SessionResult) -> None:
        answer = self._answers.pop(result.tag, None)
        if answer is not None and not answer.done():
            answer.set_result(result)
        elif result.HasField("prefill"):
            # Whoever asked has gone. Nobody waits for the answer of this one.
            self._tag += 1
            forgotten = executor_pb2.ReleaseCacheRequest(cache_id=result.prefill.kv_cache.cache_id)
            self._unsent.append(executor_pb2.SessionCall(tag=self._tag, release_cache=forgotten))
            self._news.set()


def failure_reason(error: grpc.RpcError) -> str:
    """Of a call that failed: the server's reason, or the name of gRPC's code."""
    from service.cli.channel import error_reason

    call: Any = error
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        if reason := error_reason(call):
            return reason
    return str(call.code().name)


def grpc_code_name(number: int) -> str:
    """The name of a status code, such as UNAVAILABLE of 14."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return names.get(number, "UNKNOWN")
