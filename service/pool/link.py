"""The coalesced stream to one worker.

Commands queue up while a message is being written; the next message takes all of them. That is what makes the
hop cheap: a message costs about the same with one command as with thirty. Answers come back the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc
from quire.v1 import worker_pb2, worker_pb2_grpc

from service.logging import get_logger

_log = get_logger(__name__)

_Call = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]

# What one message may carry. A message that the queue would make larger is sent in several.
_MAX_COMMANDS_PER_MESSAGE = 1024
_TARGET_MESSAGE_BYTES = 4 << 20
# Above what the gateway lets in or asks for, so the hop itself is never the limit a caller meets.
_HOP_SLACK_BYTES = 16 << 20
_SECRET_KEY = "quire-worker-secret"  # noqa: S105 - a name


class WorkerLink:
    """Owns the channel to one incarnation of a worker, and its two tasks.

    `on_response` is called for each message, on the event loop. `closed` is set once, when the stream has
    ended for whatever reason.
    """

    def __init__(
        self,
        address: str,
        on_response: Callable[[worker_pb2.ConnectResponse], None],
        *,
        secret: str,
        max_request_bytes: int,
        max_response_bytes: int,
    ) -> None:
        self.closed = asyncio.Event()
        self._on_response = on_response
        self._secret = secret
        self._queue: deque[worker_pb2.WorkerCommand] = deque()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_send_message_length", max_request_bytes + _HOP_SLACK_BYTES),
                ("grpc.max_receive_message_length", max_response_bytes + _HOP_SLACK_BYTES),
                # The socket appears when the worker is up: look for it often.
                ("grpc.initial_reconnect_backoff_ms", 20),
                ("grpc.min_reconnect_backoff_ms", 20),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        )

    def open(self) -> None:
        """Begins to connect, for as long as that takes; then the stream starts."""
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(
            wait_for_ready=True, metadata=((_SECRET_KEY, self._secret),)
        )
        self._tasks = [
            asyncio.create_task(self._write(call), name="worker-link-write"),
            asyncio.create_task(self._read(call), name="worker-link-read"),
        ]

    def send(self, command: worker_pb2.WorkerCommand) -> None:
        """Queues a command. Once the stream has closed it is dropped: its operations are answered as lost."""
        if not self.closed.is_set():
            self._queue.append(command)
            self._wake.set()

    async def close(self) -> None:
        """Ends the stream and the channel."""
        self.closed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _write(self, call: _Call) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await call.write(self._next_message())
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            _log.debug("worker stream ended while writing", error=type(error).__name__)
        finally:
            self.closed.set()

    def _next_message(self) -> worker_pb2.ConnectRequest:
        message = worker_pb2.ConnectRequest()
        size = 0
        while self._queue and len(message.commands) < _MAX_COMMANDS_PER_MESSAGE:
            command_bytes = self._queue[0].ByteSize()
            if size and size + command_bytes > _TARGET_MESSAGE_BYTES:
                break
            message.commands.append(self._queue.popleft())
            size += command_bytes
        return message

    async def _read(self, call: _Call) -> None:
        try:
            async for response in call:
                self._on_response(response)
        except grpc.RpcError as error:
            _log.debug("worker stream ended while reading", error=type(error).__name__)
        except Exception:
            _log.exception("a worker's message could not be handled")
        finally:
            self.closed.set()
