"""How the stream to one incarnation of a worker is opened.

Over the Unix socket of a process of this machine, at an address with a lease, or by the worker itself, which
has called this gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol
from urllib.parse import unquote

import grpc
from quire.v1 import worker_pb2, worker_pb2_grpc

from workers.common.message_stream import MessageStream
from workers.common.protocol import DIRECT, WORKER_NAME

_CONNECT = [
    DIRECT,
    # The worker may not listen yet: try often. To connect to another host takes three round trips.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    # Workers have one certificate, whatever their addresses are.
    ("grpc.ssl_target_name_override", WORKER_NAME),
]
_RETRY_S = 0.02


class Stream(Protocol):
    """An open stream."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        """Returns when there is room for more. Raises RpcError, ConnectionError or InvalidStateError."""

    def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """The worker's messages. Raises RpcError, MessageTooLong or DecodeError."""


class Endpoint(Protocol):
    """Owner of the stream, and of the connection below it."""

    # Whether the worker is to be given back, because no signal reaches it.
    is_leased: bool
    # Of a worker on another host; empty on this machine.
    host_address: str

    async def open(self, max_request_bytes: int, max_response_bytes: int) -> Stream:
        """Connects, without a timeout, and opens the stream. A longer message ends it."""

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

    async def open(self, max_request_bytes: int, max_response_bytes: int) -> Stream:  # noqa: ARG002 - no bound
        self._stream = stream = MessageStream(worker_pb2.ConnectResponse, max_response_bytes)
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


class LeasedEndpoint:
    """A worker that listens on an address, with mutual TLS."""

    is_leased = True

    def __init__(self, address: str, credentials: grpc.ChannelCredentials, lease: worker_pb2.Lease) -> None:
        self.host_address = address
        self._credentials = credentials
        self._lease = lease
        self._channel: grpc.aio.Channel | None = None

    async def open(self, max_request_bytes: int, max_response_bytes: int) -> Stream:
        limits = [
            ("grpc.max_send_message_length", max_request_bytes),
            ("grpc.max_receive_message_length", max_response_bytes),
        ]
        options = [*limits, *_CONNECT]
        self._channel = grpc.aio.secure_channel(self.host_address, self._credentials, options=options)
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(wait_for_ready=True)
        await call.write(worker_pb2.ConnectRequest(lease=self._lease))
        return call

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)


class AttachedEndpoint:
    """A worker that has called this gateway: the stream is its call, which lasts until `ended` is set."""

    is_leased = True

    def __init__(
        self,
        responses: AsyncIterator[worker_pb2.ConnectResponse],
        context: grpc.aio.ServicerContext[worker_pb2.ConnectResponse, worker_pb2.ConnectRequest],
    ) -> None:
        # Without gRPC's "ipv4:".
        self.host_address = unquote(context.peer().partition(":")[2])
        # Set before it is opened.
        self.lease = worker_pb2.Lease()
        self.ended = asyncio.Event()
        self._responses = responses
        self._context = context

    async def open(self, max_request_bytes: int, max_response_bytes: int) -> Stream:  # noqa: ARG002 - the server's
        await self.write(worker_pb2.ConnectRequest(lease=self.lease))
        return self

    async def close(self) -> None:
        self.ended.set()

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        await self._context.write(request)

    def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        return self._responses
