"""The HTTP server for OpenAI's API, in the gateway's event loop.

A request becomes a batch of ModelRunnerService, with the same authentication, limits and runtimes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from service.auth.connections import handshake_limits
from service.auth.handshakes import Handshakes, Peer
from service.auth.tls import http_context
from service.config import Config
from service.extension import Extension, GatewayParts
from service.extensions.openai import requests
from service.extensions.openai.bodies import BodyReader
from service.extensions.openai.connection import CHECK_INTERVAL_S, Connection
from service.extensions.openai.generate import Forward, GenerateHandler, generate
from service.extensions.openai.generation import CompletionHandler
from service.extensions.openai.middleware import HEALTH, Middleware
from service.extensions.openai.models import Models
from service.listening import listening_socket
from service.runtimes.executions import Executions
from service.text.text_model import TextModel

_BACKLOG = 1024
# Time for uvicorn's own shutdown, after the grace for requests.
_SHUTDOWN_S = 1.0
_HANDSHAKE_INTERVAL_S = 1.0


class OpenAiFront(Extension):
    """Owns the HTTP server."""

    port_for = "HTTP"

    def __init__(self, listen: str) -> None:
        self.listen = listen
        self._socket: socket.socket | None = None
        self._ended = asyncio.Event()
        # The clients of the connections, as they were a moment ago.
        self._peers: frozenset[Peer | None] = frozenset()

    def attach(self, parts: GatewayParts) -> None:
        """Makes the server. Raises ConfigError for certificates that cannot be used."""
        self._state = parts.state
        config = parts.state.config
        self._models = Models(parts.router, parts.state)
        self.bodies = BodyReader(parts.state.receiver, config.max_request_bytes, config.max_arriving_bytes)
        routes = self._routes(parts.executions, parts.text, parts.api.Forward)
        self._middleware = app = Middleware(routes, parts.authenticator, parts.state)
        for wrap in reversed(parts.http):
            app = wrap(app)
        self._server = _Server(self._uvicorn_config(config, app))

    def _routes(self, executions: Executions, text: TextModel, forward: Forward) -> Router:
        is_processed = self._state.config.openai_logprobs_mode == "processed_logprobs"
        of_tokens = functools.partial(generate, is_processed=is_processed)
        shared = executions, self._models, self._state, text, self.bodies
        routes = [
            Route(HEALTH, self._health),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._get_model),
            Route("/v1/completions", CompletionHandler(requests.completion, *shared), methods=["POST"]),
            Route("/v1/chat/completions", CompletionHandler(requests.chat, *shared), methods=["POST"]),
            Route("/inference/v1/generate", GenerateHandler(of_tokens, *shared, forward), methods=["POST"]),
        ]
        return Router(routes, redirect_slashes=False)

    def _uvicorn_config(self, config: Config, app: ASGIApp) -> uvicorn.Config:
        context = http_context(config)
        return uvicorn.Config(
            app,
            http=functools.partial(Connection, config),  # type: ignore[arg-type]
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
            timeout_keep_alive=max(1, int(config.message_timeout_s)),
            # Otherwise a pipelined request inherits the previous one's context: its tenant and request id.
            reset_contextvars=True,
            ssl_context_factory=None if context is None else lambda *_: context,
        )

    def bind(self) -> int:
        """Binds the address; clients can connect from now on. Returns the port. Raises CannotListen."""
        self._socket = listening_socket(self.listen, _BACKLOG, is_shared=self._state.config.gateways > 1)
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serves until `stop`. Call `bind` before."""
        assert self._socket is not None
        config, port = self._state.config, self._socket.getsockname()[1]
        # With TLS a connection is uvicorn's only after its handshake.
        handshakes = Handshakes(port, lambda peer, _: peer in self._peers, handshake_limits(config))
        checking = [
            asyncio.create_task(self._check_connections()),
            asyncio.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S)),
        ]
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for task in checking:
                task.cancel()
            self._socket.close()
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Accepts no more requests, waits this time for running ones, then fails the rest with Draining."""
        # Declared as int, but any number works.
        self._server.config.timeout_graceful_shutdown = grace_s + _SHUTDOWN_S  # type: ignore[assignment]
        self._server.should_exit = True
        await self._middleware.stop(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._ended.wait()

    @property
    def connections(self) -> list[Connection]:
        """Connections that are not closed yet."""
        connections = self._server.server_state.connections
        return [connection for connection in connections if isinstance(connection, Connection)]

    @property
    def num_connections(self) -> int:
        """How many these are."""
        return len(self.connections)

    async def _check_connections(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for connection in self.connections:
                connection.check_timeouts()
            self._peers = frozenset(connection.peer for connection in self.connections)

    # Requests without a batch.

    async def _health(self, _request: Request) -> Response:
        state = self._state.state_name
        return JSONResponse({"status": state}, 200 if state == "serving" else 503)

    async def _list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models.listed()})

    async def _get_model(self, request: Request) -> Response:
        return JSONResponse(self._models.entry(request.path_params["model"]))


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the gateway has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
