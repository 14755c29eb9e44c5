"""The coalesced stream to one worker.

Commands are queued while a message is being written, and the next message carries all of them. A message with
thirty commands costs about as much as one with a single command. Answers are batched in the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc
from quire.v1 import worker_pb2

from service.config import Config
from service.logging import get_logger
from service.pool.endpoints import Endpoint, Stream
from service.printable import escaped

_log = get_logger(__name__)

# Limits of one message. A longer queue is sent in several messages.
_MAX_COMMANDS_PER_MESSAGE = 1024
_TARGET_MESSAGE_BYTES = 4 << 20
# Added to the size limits of clients' messages, so that a client never meets the limit of this stream.
_HOP_SLACK_BYTES = 16 << 20
# How long a worker may take to notice that it was given back.
_GIVE_BACK_TIMEOUT_S = 1.0
_REFUSED = grpc.StatusCode.FAILED_PRECONDITION
_MAX_REFUSAL_CHARS = 200


class WorkerLink:
    """Owns the endpoint of one incarnation of a worker, and its two tasks.

    `on_response` is called for each message, on the event loop. `closed` is set when the stream has ended,
    for any reason.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        config: Config,
        on_response: Callable[[worker_pb2.ConnectResponse], None],
    ) -> None:
        self.closed = asyncio.Event()
        # Why the worker has refused the lease.
        self.refusal = ""
        self._endpoint = endpoint
        self._on_response = on_response
        self._queue: deque[worker_pb2.WorkerCommand] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_given_back = False
        self._options = [
            ("grpc.max_send_message_length", config.max_request_bytes + _HOP_SLACK_BYTES),
            ("grpc.max_receive_message_length", config.max_response_bytes + _HOP_SLACK_BYTES),
            # The worker may not listen yet: retry often.
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 100),
        ]

    def open(self) -> None:
        """Starts to connect, without a timeout, and then opens the stream."""
        self._task = asyncio.create_task(self._run(), name="worker-link")

    def send(self, *commands: worker_pb2.WorkerCommand) -> None:
        """Queues commands. Drops them if the stream is closed: loss of the worker fails its operations."""
        if not self.closed.is_set():
            self._queue.extend(commands)
            self._wake.set()

    async def close(self, *, give_back: bool) -> None:
        """Closes the stream. `give_back`: no gateway will continue with what the worker holds."""
        self.closed.set()
        if self._task is not None:
            if give_back and self._endpoint.is_leased:
                self._queue.clear()
                self._is_given_back = True
                self._wake.set()
                await asyncio.wait({self._task}, timeout=_GIVE_BACK_TIMEOUT_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._endpoint.close()

    async def _run(self) -> None:
        writing = None
        try:
            stream = await self._endpoint.open(self._options)
            writing = asyncio.create_task(self._write(stream), name="worker-link-write")
            async for response in stream:
                self._on_response(response)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            _log.debug("worker stream ended while reading", error=type(error).__name__)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is _REFUSED:
                self.refusal = escaped((error.details() or "")[:_MAX_REFUSAL_CHARS])
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
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await stream.write(self._next_message())
                if self._is_given_back:
                    await stream.write(worker_pb2.ConnectRequest(give_back=True))
                    return
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
