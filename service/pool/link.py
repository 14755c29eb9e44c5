"""The coalesced stream to one worker.

Commands are queued while a message is being written, and the next message carries all of them. A message with
thirty commands costs about as much as one with a single command. Answers are batched in the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc
from quire.v1 import worker_pb2, worker_pb2_grpc

from service.config import Config
from service.logging import get_logger

_log = get_logger(__name__)

_Call = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]

# Limits of one message. A longer queue is sent in several messages.
_MAX_COMMANDS_PER_MESSAGE = 1024
_TARGET_MESSAGE_BYTES = 4 << 20
# Added to the size limits of clients' messages, so that a client never meets the limit of this stream.
_HOP_SLACK_BYTES = 16 << 20
_SECRET_KEY = "quire-worker-secret"  # noqa: S105 - a name


class WorkerLink:
    """Owns the channel to one incarnation of a worker, and its two tasks.

    `on_response` is called for each message, on the event loop. `closed` is set when the stream has ended,
    for any reason.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        config: Config,
        on_response: Callable[[worker_pb2.ConnectResponse], None],
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
                ("grpc.max_send_message_length", config.max_request_bytes + _HOP_SLACK_BYTES),
                ("grpc.max_receive_message_length", config.max_response_bytes + _HOP_SLACK_BYTES),
                # The socket exists only once the worker listens: retry often.
                ("grpc.initial_reconnect_backoff_ms", 20),
                ("grpc.min_reconnect_backoff_ms", 20),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        )

    def open(self) -> None:
        """Starts to connect, without a timeout, and then opens the stream."""
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(
            wait_for_ready=True, metadata=((_SECRET_KEY, self._secret),)
        )
        self._tasks = [
            asyncio.create_task(self._write(call), name="worker-link-write"),
            asyncio.create_task(self._read(call), name="worker-link-read"),
        ]

    def send(self, command: worker_pb2.WorkerCommand) -> None:
        """Queues a command. Drops it if the stream is closed: loss of the worker fails its operations."""
        if not self.closed.is_set():
            self._queue.append(command)
            self._wake.set()

    async def close(self) -> None:
        """Closes the stream and the channel."""
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
