"""How the stream to one incarnation of a worker is opened.

Over the Unix socket of a process of this machine, or by the worker itself, which has dialled this gateway:
see `DialledWorker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from quire.v1 import worker_pb2

from workers.common.message_stream import MessageStream

_RETRY_S = 0.02


class Stream(Protocol):
    """An open stream."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        """Returns when there is room for more. Raises ConnectionError."""

    def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """The worker's messages. Raises MessageTooLong or DecodeError."""


class Endpoint(Protocol):
    """Owner of the stream, and of the connection below it."""

    # Whether the worker is to be given back, because no signal reaches it.
    is_leased: bool
    # Of a worker on another host; empty on this machine.
    host_address: str

    async def open(self, max_bytes: int) -> Stream:
        """Connects, without a timeout, and opens the stream. A longer message of the worker ends it."""

    async def close(self) -> None:
        """Closes stream and connection."""


class SocketEndpoint:
    """The Unix socket of a process on this machine, which ends by a signal or with its gateway.

    The first message has the secret. See workers/socket_server.py.
    """

    is_leased = False
    host_address = ""

    def __init__(self, path: str, secret: str) -> None:
        self._path = path
        self._secret = secret
        self._stream: MessageStream[worker_pb2.ConnectResponse] | None = None

    async def open(self, max_bytes: int) -> Stream:
        self._stream = stream = MessageStream(worker_pb2.ConnectResponse, max_bytes)
        while True:
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: stream, self._path)
                break
            except OSError:
                # It does not listen yet. The health check ends one that never does.
                await asyncio.sleep(_RETRY_S)
        await stream.write(worker_pb2.ConnectRequest(secret=self._secret))
        return stream

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
