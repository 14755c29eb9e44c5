"""The Unix socket on which a worker serves the gateway of its machine.

The first message has the secret with which the worker was started; without it a connection is closed
without effect. Workers on other hosts are served by gRPC (`pool_member`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from google.protobuf.message import DecodeError
from quire.v1 import worker_pb2

from workers.common.message_stream import MessageStream, MessageTooLong
from workers.logging import get_logger
from workers.server import WorkerServer

# A gateway sends the first message at once, and it contains nothing but the secret.
_FIRST_TIMEOUT_S = 5.0
_MAX_FIRST_BYTES = 1 << 10

_log = get_logger(__name__)


async def listen(path: str, secret: str, worker: WorkerServer, max_request_bytes: int) -> asyncio.Server:
    """Serves connections to a new socket, with messages up to this size. Raises OSError."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(stream: MessageStream[worker_pb2.ConnectRequest]) -> None:
        try:
            if await _has_secret(stream, secret):
                stream.max_bytes = max_request_bytes
                await worker.serve_stream(stream, stream.write)
            else:
                _log.warning("a connection without the worker's secret was refused")
        finally:
            stream.close()

    def accept() -> MessageStream[worker_pb2.ConnectRequest]:
        stream = MessageStream(worker_pb2.ConnectRequest, _MAX_FIRST_BYTES)
        task = asyncio.create_task(serve(stream))
        serving.add(task)
        task.add_done_callback(serving.discard)
        return stream

    return await asyncio.get_running_loop().create_unix_server(accept, path)


async def _has_secret(stream: MessageStream[worker_pb2.ConnectRequest], secret: str) -> bool:
    with contextlib.suppress(StopAsyncIteration, MessageTooLong, DecodeError):
        # A pause of this process counts as one of the two halves.
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_TIMEOUT_S / 2):
                    first = await anext(stream)
                return hmac.compare_digest(first.secret.encode(), secret.encode())
    return False
