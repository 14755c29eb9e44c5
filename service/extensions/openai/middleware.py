"""The middleware of every request: authentication, a request id, logging, and errors in OpenAI's form.

The counterpart of gRPC's interceptor: an unauthorized request is refused before its body arrives, and
unexpected exceptions become errors without their text. Each route declares who may use it; this is checked
once the router has chosen the route.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from service.api.call_log import elapsed_ms
from service.api.server_state import ServerState
from service.api.validation import is_request_id
from service.auth.authenticator import AUTHORIZATION, Authenticator, current_tenant
from service.errors import NOT_FAILURES, Draining, InternalError, InvalidArgument, QuireError
from service.extensions.http.connection import connection_of
from service.extensions.http.framing import is_address
from service.extensions.openai import errors
from service.extensions.openai.responses import event
from service.extensions.openai.translated import named_event
from service.logging import bind_request_id, get_logger
from service.printable import escaped
from service.setting_rules import is_private

_log = get_logger(__name__)
# Anthropic's API: errors have its form, and the token may be in its header.
MESSAGES = "/v1/messages"
_API_KEY = "x-api-key"
_REQUEST_ID = "x-request-id"
_MAX_LOGGED_CHARACTERS = 64
_NO_SUCH_PATH = InvalidArgument("NO_SUCH_PATH", "", "nothing is served at this path")
_BAD_METHOD = InvalidArgument("BAD_METHOD", "", "the path does not support this method")


class Access(StrEnum):
    """Who may use a route, as the gRPC method with the same roles in the authenticator."""

    # Probes of load balancers: they have no tokens, and may use any Host header.
    PROBE = "/grpc.health.v1.Health/Check"
    # Responses without secrets.
    PUBLIC = ""
    LIST = "/quire.v1.ModelRunnerService/ListRuntimes"
    EXECUTE = "/quire.v1.ModelRunnerService/Execute"
    LOAD_WEIGHTS = "/quire.v1.AdminService/LoadWeights"
    LOAD_ADAPTER = "/quire.v1.AdminService/LoadAdapter"


class GuardedRoute(Route):
    """A route that only handles requests with access to it, however they spell its path."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], access: Access, methods: Sequence[str] = ("GET",)
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self._access = access

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises QuireError, and HTTPException for a method that the route does not have."""
        middleware: Middleware = scope["app"]
        with middleware.admitted(scope, self._access):
            await super().handle(scope, receive, send)


class Middleware:
    """The outermost ASGI application. Passes permitted requests to the routes."""

    def __init__(
        self,
        routes: Sequence[GuardedRoute],
        authenticator: Authenticator | None,
        state: ServerState,
        listen: str,
    ) -> None:
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)
        self._authenticator = authenticator
        self._state = state
        self._is_local_only = authenticator is None and is_private(listen)
        self._running: set[asyncio.Task[None]] = set()
        self._has_stopped = False

    async def stop(self, grace_s: float) -> None:
        """Waits `grace_s` for running requests, then fails them and all later ones with Draining."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._running:
                    await asyncio.wait(self._running)
        self._has_stopped = True
        for running in self._running:
            running.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only CancelledError. The reason of an error is left in the scope, for traces."""
        request = Request(scope, receive)
        own = request.headers.get(_REQUEST_ID, "")
        request_id = own if own and is_request_id(own) else secrets.token_hex(8)
        bind_request_id(request_id)
        response = _Response(request, send, request_id, 2 * self._state.config.max_request_bytes)
        name = escaped(f"{request.method} {scope['path']}"[:_MAX_LOGGED_CHARACTERS])
        began_s = time.monotonic()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._running.add(task)
        # Further headers of an error: the methods of a path.
        headers: Mapping[str, str] = {}
        try:
            # With this key starlette's routes raise HTTPException instead of responding.
            scope["app"] = self
            await self._router(scope, receive, response.send)
            return
        except asyncio.CancelledError:
            if not self._has_stopped:
                self._state.call_log.cancelled(name, elapsed_ms(began_s))
                if task.cancelling():
                    raise
                # The client has disconnected: a response would not be read.
                connection_of(scope).abort()
                return
            task.uncancel()
            error: QuireError = Draining()
        except QuireError as failure:
            error = failure.without_traceback()
        except HTTPException as failure:
            error = _BAD_METHOD
            headers = failure.headers or {}
        except NOT_FAILURES:
            raise
        except BaseException:
            _log.exception("request failed unexpectedly", request=name)
            error = InternalError()
        finally:
            self._running.discard(task)
        self._state.call_log.refused(name, error, elapsed_ms(began_s))
        scope["quire.error"] = error.reason
        await response.fail(error, headers)

    async def _not_found(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        # A caller without access does not learn which paths exist.
        with self.admitted(scope, Access.EXECUTE):
            raise _NO_SUCH_PATH

    @contextlib.contextmanager
    def admitted(self, scope: Scope, access: Access) -> Iterator[None]:
        """Checks host and authentication, and counts the request while it runs. Raises QuireError."""
        if access is Access.PROBE:
            yield
            return
        request = Request(scope)
        if self._is_local_only and not is_address(request.headers.get("host", "")):
            text = "without authentication the Host header must be an IP address or localhost"
            raise InvalidArgument("BAD_HOST", "", text)
        if access is Access.PUBLIC:
            yield
            return
        if self._authenticator is not None:
            tokens = request.headers.getlist(AUTHORIZATION)
            # Not `request.url.path`, which depends on the Host header.
            if not tokens and scope["path"].startswith(MESSAGES):
                tokens = [f"Bearer {key}" for key in request.headers.getlist(_API_KEY)]
            # Not decided by the context's tenant, which may be of an earlier request on the connection.
            if not self._authenticator.authenticate(access, [(AUTHORIZATION, token) for token in tokens]):
                self._authenticator.authenticate_by_certificate(access, connection_of(scope).identities())
        if self._has_stopped:
            raise Draining
        # Without authentication the context must not be read: nothing has set its tenant.
        tenant = None if self._authenticator is None else current_tenant()
        with self._state.budgets.of(tenant).http.held():
            yield


class _Response:
    """The response to a request, and its progress."""

    def __init__(self, request: Request, send: Send, request_id: str, max_dropped_bytes: int) -> None:
        """`max_dropped_bytes`: how much of a body is read and dropped after the response."""
        self._request = request
        self._send = send
        self._request_id = request_id
        self._max_dropped_bytes = max_dropped_bytes
        self._has_begun = self._is_stream = False

    async def send(self, message: Message) -> None:
        connection = connection_of(self._request.scope)
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = [*message["headers"], (_REQUEST_ID.encode(), self._request_id.encode())]
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            if connection.is_receiving:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif not message.get("more_body", False) and connection.is_receiving:
            # Closing the connection while the client sends would reset it, and could lose the response.
            await self._send({**message, "more_body": True})
            connection.is_answered = True
            dropped_bytes, more = 0, True
            while more and dropped_bytes <= self._max_dropped_bytes:
                received = await self._request.receive()
                dropped_bytes += len(received.get("body", b""))
                more = received.get("more_body", False)
            message = {"type": "http.response.body"}
        await self._send(message)

    async def fail(self, error: QuireError, headers: Mapping[str, str]) -> None:
        """Reports an error by a response, an event of the stream, or an abort, depending on the progress."""
        is_anthropic = self._request.scope["path"].startswith(MESSAGES)
        body = errors.anthropic_body(error) if is_anthropic else errors.body(error)
        if not self._has_begun:
            headers = {**headers, **errors.headers(error)}
            response = JSONResponse(body, errors.http_status(error), headers)
            await response(self._request.scope, self._request.receive, self.send)
        elif self._is_stream:
            frame = named_event(body) if is_anthropic else event(body)
            await self._send({"type": "http.response.body", "body": frame.encode()})
        else:
            connection_of(self._request.scope).abort()
