"""The other gateways of this server: their addresses, and calls to them for a caller of this one."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import grpc
from grpc_status import rpc_status
from quire.v1 import runner_pb2

from service.api.interceptor import REQUEST_ID_METADATA, CallInterceptor, Continuation, Handler
from service.api.status import from_status
from service.auth.authenticator import HOP, TENANT, current_tenant_name
from service.config import Config
from service.errors import DeadlinePassed, GatewayUnavailable, QuireError, Unauthenticated
from service.logging import current_request_id, get_logger
from workers.common.protocol import DIRECT, GATEWAY_NAME

_log = get_logger(__name__)
_EXECUTE = "Execute"
_OF_RUNNER = (_EXECUTE, "CancelExecution")
# Metadata that this hop sets itself.
_OWN = frozenset({HOP, TENANT, REQUEST_ID_METADATA, "user-agent"})
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"


@dataclass(slots=True)
class Addresses:
    """The addresses of the owners of the shards. A shard without an owner has none.

    Attributes:
        peers: The addresses for gateways.
        public: The addresses at which clients reach exactly this owner. Empty: not known.
    """

    peers: Mapping[int, str] = field(default_factory=dict)
    public: Mapping[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Connection:
    """A connection to a gateway, and the methods that were called on it, by name."""

    channel: grpc.aio.Channel
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    in_flight: int = 0


class Peers:
    """Owner of a connection to each of the other gateways."""

    def __init__(
        self,
        config: Config,
        secret: str,
        addresses: Addresses,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`addresses`: updated by the caller when owners change. Without `credentials`: Unix sockets only.

        `secret`: authenticates calls between gateways.
        """
        self.secret = secret
        self.addresses = addresses
        self._credentials = credentials
        self._options: list[tuple[str, int | str]] = [
            DIRECT,
            ("grpc.max_receive_message_length", config.max_response_bytes),
            ("grpc.max_send_message_length", config.max_request_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            # Reconnect soon to a gateway that was restarted.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 3000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # End the calls to a gateway that hangs or is cut off: they may have no deadline.
            ("grpc.keepalive_time_ms", 2000),
            ("grpc.keepalive_timeout_ms", 3000),
            ("grpc.http2.ping_timeout_ms", 3000),
            # Ping while a call sends no data, too: otherwise, after two pings, one a minute.
            ("grpc.http2.max_pings_without_data", 0),
        ]
        if credentials is not None:
            # All gateways have the same certificate, whatever their addresses are.
            self._options.append(("grpc.ssl_target_name_override", GATEWAY_NAME))
        self._connections: dict[str, _Connection] = {}

    async def call(
        self,
        address: str,
        method: str,
        request: Any,
        response: type[Any],
        timeout_s: float | None,
        metadata: Metadata,
    ) -> Any:
        """The answer of a gateway to a call of ModelExecutorService, or to CancelExecution.

        `metadata`: the caller's.

        Raises GatewayUnavailable, or what it answers.
        """
        async with self._calling(address, method, request, response) as start:
            return await start(request, timeout=timeout_s, metadata=self.passed_on(metadata))

    @contextlib.asynccontextmanager
    async def executing(
        self,
        address: str,
        request: runner_pb2.ExecuteRequest,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> AsyncGenerator[Any]:
        """An Execute of a gateway: grpc's call object, an async iterator of responses. Raises as `call`."""
        response = runner_pb2.ExecuteResponse
        async with self._calling(address, _EXECUTE, request, response) as start:
            call = start(request, timeout=timeout_s, metadata=self.passed_on(metadata))
            try:
                yield call
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _calling(
        self, address: str, method: str, request: Any, response: type[Any]
    ) -> AsyncGenerator[Callable[..., Any]]:
        """A function that starts a call of a method. The connection stays open meanwhile."""
        if address not in self._connections:
            await self._close_unneeded()
        peer = self._connections.get(address) or self._connect(address)
        if method not in peer.methods:
            service = "ModelRunnerService" if method in _OF_RUNNER else "ModelExecutorService"
            new = peer.channel.unary_stream if method == _EXECUTE else peer.channel.unary_unary
            peer.methods[method] = new(
                f"/quire.v1.{service}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
        peer.in_flight += 1
        try:
            yield peer.methods[method]
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        finally:
            peer.in_flight -= 1

    def _connect(self, address: str) -> _Connection:
        self._connections[address] = made = _Connection(
            grpc.aio.insecure_channel(address, options=self._options)
            if self._credentials is None
            else grpc.aio.secure_channel(address, self._credentials, options=self._options)
        )
        return made

    async def _close_unneeded(self) -> None:
        """Closes connections to gateways that have no shard any more and have no running call."""
        for address in self._connections.keys() - set(self.addresses.peers.values()):
            if not self._connections[address].in_flight:
                await self._connections.pop(address).channel.close(None)

    def passed_on(self, metadata: Metadata) -> Sequence[tuple[str, str | bytes]]:
        """The metadata of a forwarded call: the caller's, and what marks it as forwarded."""
        own = (HOP, self.secret), (TENANT, current_tenant_name()), (REQUEST_ID_METADATA, current_request_id())
        return (*((key, value) for key, value in metadata or () if key not in _OWN), *own)

    async def close(self) -> None:
        """Ends all calls."""
        while self._connections:
            await self._connections.popitem()[1].channel.close(None)


class PeerInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates calls on the port for gateways, by their secret: workers have valid certificates, too."""

    def __init__(self, secret: str, interceptor: CallInterceptor) -> None:
        """`interceptor`: handles the calls that are authenticated."""
        self._interceptor = interceptor
        self._secret = secret.encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        given = dict(handler_call_details.invocation_metadata or ()).get(HOP, "")
        if not hmac.compare_digest(str(given).encode(), self._secret):
            refused = Unauthenticated("NOT_A_GATEWAY", "only gateways of this server may call this port")
            return self._interceptor.refusing_handler(handler_call_details.method, refused)
        return await self._interceptor.intercept_service(continuation, handler_call_details)


def is_forwarded(metadata: Metadata) -> bool:
    """Whether a call came from another gateway, so that it is not forwarded again."""
    return any(key == HOP for key, _ in metadata or ())


def _failure(error: grpc.aio.AioRpcError) -> QuireError:
    status = rpc_status.from_call(cast("grpc.Call", error))
    if status is not None and status.details:
        return from_status(status)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(forwarded=True)
    _log.info("another gateway cannot be reached", code=error.code().name, why=error.details())
    return GatewayUnavailable()
