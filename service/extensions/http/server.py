"""An HTTP port of the gateway: uvicorn in its event loop, without signal handlers, and with limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from service.extensions.http.connection import CHECK_INTERVAL_S, Connection, HttpLimits
from service.handshakes import HandshakeLimits, Handshakes, Peer
from service.listening import listening_socket

_BACKLOG = 1024
# The time for uvicorn's own shutdown, after the grace period of requests.
_SHUTDOWN_S = 1.0
_HANDSHAKE_INTERVAL_S = 1.0


class HttpServer:
    """Serves an ASGI application at an address."""

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        limits: HttpLimits,
        *,
        tls: tuple[ssl.SSLContext, HandshakeLimits] | None = None,
        is_shared: bool = False,
    ) -> None:
        """`tls`: also has the limits of unfinished handshakes. `is_shared`: see `bind`."""
        self._listen, self._is_shared = listen, is_shared
        self._handshake_limits = None if tls is None else tls[1]
        self._socket: socket.socket | None = None
        self._ended = asyncio.Event()
        # The clients of the connections at the last check.
        self._peers: frozenset[Peer | None] = frozenset()
        self._server = _Server(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                # `Connection.check_timeouts` closes idle connections.
                timeout_keep_alive=math.ceil(limits.idle_s),
                # Otherwise a pipelined request inherits the context of the previous one, such as its tenant.
                reset_contextvars=True,
                ssl_context_factory=None if tls is None else lambda *_: tls[0],
            )
        )

    def bind(self) -> int:
        """Binds the address, so that clients can connect. Returns the port. Raises CannotListen.

        If it is shared, other gateways of this host listen there, too.
        """
        self._socket = listening_socket(self._listen, _BACKLOG, is_shared=self._is_shared)
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serves until `stop`, or until it is cancelled, which ends all connections. Call `bind` before."""
        assert self._socket is not None
        checking = [asyncio.create_task(self._check_connections())]
        if self._handshake_limits is not None:
            # With TLS, uvicorn sees a connection only after its handshake.
            port = self._socket.getsockname()[1]
            handshakes = Handshakes(port, lambda peer, _: peer in self._peers, self._handshake_limits)
            checking.append(asyncio.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S)))
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for task in checking:
                task.cancel()
            self._server.close()
            self._socket.close()
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Accepts no more connections, and closes those without a request. Returns when all have ended.

        `grace_s`: after this time, running requests are cancelled.
        """
        # Declared as int, but any number works.
        self._server.config.timeout_graceful_shutdown = grace_s + _SHUTDOWN_S  # type: ignore[assignment]
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + _SHUTDOWN_S):
                await self._ended.wait()

    @property
    def connections(self) -> list[Connection]:
        """Connections that are not closed yet."""
        connections = self._server.server_state.connections
        return [connection for connection in connections if isinstance(connection, Connection)]

    async def _check_connections(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for connection in self.connections:
                connection.check_timeouts()
            self._peers = frozenset(connection.peer for connection in self.connections)


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the gateway has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers: list[asyncio.base_events.Server] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Closes the listening sockets and all connections that are left."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.abort()
