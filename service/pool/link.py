"""The coalesced stream to one worker.

Commands are queued while a message is being written, and the next message carries all of them. A message with
thirty commands costs about as much as one with a single command. Answers are batched in the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from google.protobuf.message import DecodeError

from service.config import Config
from service.logging import get_logger
from workers.common import worker_pb2
from workers.common.message_stream import MessageStream, MessageTooLong
from workers.common.protocol import HOP_SLACK_BYTES, TARGET_MESSAGE_BYTES

_log = get_logger(__name__)

# How long a worker may take to notice that it was given back.
_GIVE_BACK_TIMEOUT_S = 1.0
_BROKEN = ConnectionError, MessageTooLong, DecodeError


# An open stream to a worker.
Stream: TypeAlias = MessageStream[worker_pb2.ConnectResponse]


class Endpoint(Protocol):
    """Owner of the stream of one incarnation of a worker, and of the connection below it."""

    # The address of a worker on another host; empty on this machine.
    host_address: str

    async def open(self, max_bytes: int) -> Stream:
        """Waits for the stream, without a timeout. A longer message of the worker ends it."""

    async def close(self) -> None:
        """Closes stream and connection."""


class WorkerLink:
    """Owns the endpoint of one incarnation of a worker, and its two tasks. Connects without a timeout.

    `on_response` is called for each message, on the event loop. `closed` is set when the stream has ended,
    for any reason.
    """

    def __init__(
        self, endpoint: Endpoint, config: Config, on_response: Callable[[worker_pb2.ConnectResponse], None]
    ) -> None:
        self.closed = asyncio.Event()
        self._endpoint = endpoint
        self._on_response = on_response
        self._queue: deque[worker_pb2.ConnectRequest] = deque()
        self._is_open = False
        # Done when the queue has something for the task that writes. Faster than an Event.
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._max_bytes = config.max_response_bytes + HOP_SLACK_BYTES
        self._task = asyncio.create_task(self._run(), name="worker-link")

    def send(self, request: worker_pb2.ConnectRequest) -> None:
        """Queues commands, and owns them. With the stream closed, the worker's loss fails its operations."""
        if not self.closed.is_set():
            self._queue.append(request)
            if not self._wake.done():
                self._wake.set_result(None)

    async def close(self, *, give_back: bool) -> None:
        """Closes the stream. `give_back`: no gateway will continue with what the worker holds."""
        self.closed.set()
        if give_back and self._is_open:
            self._queue = deque([worker_pb2.ConnectRequest(give_back=True)])
            if not self._wake.done():
                self._wake.set_result(None)
            await asyncio.wait({self._task}, timeout=_GIVE_BACK_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._endpoint.close()

    async def _run(self) -> None:
        writing = None
        try:
            stream = await self._endpoint.open(self._max_bytes)
            self._is_open = True
            writing = asyncio.create_task(self._write(stream), name="worker-link-write")
            async for response in stream:
                self._on_response(response)
        except _BROKEN as error:
            _log.debug("worker stream ended while reading", error=type(error).__name__)
        except Exception:
            _log.exception("a worker's message could not be handled")
        finally:
            self.closed.set()
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, stream: Stream) -> None:
        try:
            while True:
                await self._wake
                self._wake = asyncio.get_running_loop().create_future()
                while self._queue:
                    request = self._queue.popleft()
                    if self._queue or request.ByteSize() > TARGET_MESSAGE_BYTES:
                        request = self._fitted(request)
                    await stream.write(request)
                    if request.give_back:
                        return
        except _BROKEN as error:
            _log.debug("worker stream ended while writing", error=type(error).__name__)
        finally:
            self.closed.set()

    def _fitted(self, request: worker_pb2.ConnectRequest) -> worker_pb2.ConnectRequest:
        """A message with what was queued after it, as far as it has room. Large ones are cut."""
        while self._queue and request.ByteSize() <= TARGET_MESSAGE_BYTES:
            request.MergeFrom(self._queue.popleft())
        while request.ByteSize() > TARGET_MESSAGE_BYTES and len(request.commands) > 1:
            half = len(request.commands) // 2
            self._queue.appendleft(worker_pb2.ConnectRequest(commands=request.commands[half:]))
            del request.commands[half:]
        return request
