"""How the stream to one incarnation of a worker is opened.

Over the Unix socket of a process of this machine, at an address with a lease, or by the worker itself, which
has called this gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
from quire.v1 import worker_pb2, worker_pb2_grpc

from service.pool.pool_files import WORKER_NAME

Options = Sequence[tuple[str, Any]]
# The timeout of an attempt to connect. To another host that takes three round trips.
_LOCAL_CONNECT = ("grpc.min_reconnect_backoff_ms", 20)
_CONNECT = ("grpc.min_reconnect_backoff_ms", 3000)
_SECRET_KEY = "quire-worker-secret"  # noqa: S105 - a name


class Stream(Protocol):
    """An open stream."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        """Returns when the message is on its way. Raises grpc.RpcError or asyncio.InvalidStateError."""

    def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """The worker's messages. Raises grpc.RpcError."""


class Endpoint(Protocol):
    """Owner of the stream, and of the connection below it."""

    # Whether the worker is to be given back, because no signal reaches it.
    is_leased: bool
    # Of a worker on another host; empty on this machine.
    host_address: str

    async def open(self, options: Options) -> Stream:
        """Connects, without a timeout, and opens the stream. `options`: those of a gRPC channel."""

    async def close(self) -> None:
        """Closes stream and connection."""


class _CalledEndpoint:
    """A worker that this gateway calls."""

    _channel: grpc.aio.Channel | None = None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)


class SocketEndpoint(_CalledEndpoint):
    """The Unix socket of a process on this machine, which ends by a signal or with its gateway."""

    is_leased = False
    host_address = ""

    def __init__(self, address: str, secret: str) -> None:
        """`address`: as gRPC writes it."""
        self.address = address
        self.secret = secret

    async def open(self, options: Options) -> Stream:
        self._channel = grpc.aio.insecure_channel(self.address, options=[*options, _LOCAL_CONNECT])
        metadata = ((_SECRET_KEY, self.secret),)
        return worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(
            wait_for_ready=True, metadata=metadata
        )


class LeasedEndpoint(_CalledEndpoint):
    """A worker that listens on an address, with mutual TLS."""

    is_leased = True

    def __init__(self, address: str, credentials: grpc.ChannelCredentials, lease: worker_pb2.Lease) -> None:
        self.host_address = address
        self._credentials = credentials
        self._lease = lease

    async def open(self, options: Options) -> Stream:
        # Workers have one certificate, whatever their addresses are.
        options = [*options, _CONNECT, ("grpc.ssl_target_name_override", WORKER_NAME)]
        self._channel = grpc.aio.secure_channel(self.host_address, self._credentials, options=options)
        call = worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(wait_for_ready=True)
        await call.write(worker_pb2.ConnectRequest(lease=self._lease))
        return call


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

    async def open(self, options: Options) -> Stream:  # noqa: ARG002 - the connection has those of the server
        await self.write(worker_pb2.ConnectRequest(lease=self.lease))
        return self

    async def close(self) -> None:
        self.ended.set()

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        await self._context.write(request)

    def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        return self._responses
