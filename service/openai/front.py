"""OpenAI's API over HTTP, in the gateway's own event loop: what starts and ends it.

A thin way in for clients that exist already: what they ask becomes a batch of ModelRunnerService, with the
same doors, bounds and runtimes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from quire.v1 import executor_pb2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from service.api.server_state import ServerState
from service.config import Config
from service.doors.doors import Doors
from service.openai import requests
from service.openai.bodies import Bodies
from service.openai.connection import LOOK_S, Bounds, Connection
from service.openai.generation import Generation
from service.openai.guard import HEALTH, Guard
from service.openai.models import Models
from service.openai.tls import server_context
from service.openai.wanted import Wanted
from service.runtimes import router as runtimes
from service.runtimes.executions import Executions
from service.text.text_model import TextModel

_MAX_HEADER_BYTES = 1 << 16
_BACKLOG = 1024
# What its own end may take beside.
_END_S = 1.0


class OpenAiFront:
    """Owner of the HTTP server."""

    def __init__(
        self,
        executions: Executions,
        router: runtimes.Router,
        state: ServerState,
        text: TextModel,
        doors: Doors | None,
    ) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        config = state.config
        self._listen = config.openai_listen
        self._state = state
        self._models = Models(router, state)
        self._wanted = Wanted()
        self.bodies = Bodies(state.reception, config.max_request_bytes, config.max_arriving_bytes)
        self._socket: socket.socket | None = None
        self._server = _Server(self._settings(config, Guard(self._routes(executions, text), doors, state)))

    def _routes(self, executions: Executions, text: TextModel) -> Router:
        def generation(parse: Any) -> Generation:
            return Generation(parse, executions, self._models, self._state, text, self._wanted, self.bodies)

        routes = [
            Route(HEALTH, self._health),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._get_model),
            Route("/v1/completions", generation(requests.completion), methods=["POST"]),
            Route("/v1/chat/completions", generation(requests.chat), methods=["POST"]),
        ]
        return Router(routes, redirect_slashes=False, default=_nothing_there)

    def _settings(self, config: Config, app: Guard) -> uvicorn.Config:
        bounds = Bounds(config.max_connections, config.message_timeout_s, config.session_stall_s)
        context = server_context(config)
        return uvicorn.Config(
            app,
            # What it makes of them is a connection.
            http=functools.partial(Connection, bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            # Connections without a request are given up by `look`.
            timeout_keep_alive=max(1, int(config.message_timeout_s)),
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            # Else a pipelined request begins with whatever the one before has left: its tenant, its id.
            reset_contextvars=True,
            ssl_context_factory=None if context is None else lambda *_: context,
        )

    def bind(self) -> int:
        """Takes the address; from now on clients can connect. Returns the port. Raises OSError."""
        host, _, port = self._listen.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise
        self._socket = bound
        return int(bound.getsockname()[1])

    async def run(self) -> None:
        """Serves until it is stopped, after `bind`."""
        assert self._socket is not None
        watching = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            self._socket.close()

    async def stop(self, grace_s: float) -> None:
        """Serves nobody new, lets what runs finish, and then ends it, of which clients are told."""
        # Whole numbers are what it has options for; it waits for as long as this says.
        self._server.config.timeout_graceful_shutdown = grace_s + _END_S  # type: ignore[assignment]
        self._server.should_exit = True
        await self._wanted.end(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._server.ended.wait()

    @property
    def connections(self) -> list[Connection]:
        """Those that are open, or about to be closed."""
        found = self._server.server_state.connections
        return [connection for connection in found if isinstance(connection, Connection)]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in self.connections:
                connection.look()

    # What needs no batch.

    async def _health(self, _request: Request) -> Response:
        is_well = self._state.state == executor_pb2.SERVER_STATE_SERVING
        name = executor_pb2.ServerState.Name(self._state.state).rpartition("_")[2].lower()
        return JSONResponse({"status": name}, 200 if is_well else 503)

    async def _list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models.listed()})

    async def _get_model(self, request: Request) -> Response:
        return JSONResponse(self._models.entry(request.path_params["model"]))


class _Server(uvicorn.Server):
    """uvicorn's, which leaves the signals to the gateway."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self.ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _nothing_there(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise HTTPException(404)
