"""The middleware of every request: authentication, a request id, logging, and errors in OpenAI's form.

The counterpart of the interceptor for gRPC: an unauthorized request is refused before its body is read, and
unexpected exceptions become errors without their text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.call_log import elapsed_ms
from service.api.server_state import ServerState
from service.api.validation import is_request_id
from service.auth.authenticator import AUTHORIZATION, Authenticator, current_tenant
from service.errors import NOT_FAILURES, Draining, InternalError, InvalidArgument, QuireError
from service.extensions.http.connection import connection_of
from service.extensions.http.framing import is_address
from service.extensions.openai import adapter_calls, errors, page, weight_transfer
from service.extensions.openai.responses import event
from service.extensions.openai.translated import named_event
from service.logging import bind_request_id, get_logger
from service.printable import escaped
from service.setting_rules import is_private

_log = get_logger(__name__)
HEALTH = "/health"
# Anthropic's API: errors have its form, and a token may come in its header.
MESSAGES = "/v1/messages"
_API_KEY = "x-api-key"
_REQUEST_ID = "x-request-id"
# The equivalent gRPC methods, for which the authenticator knows the required role.
_LIST = "/quire.v1.ModelRunnerService/ListRuntimes"
_EXECUTE = "/quire.v1.ModelRunnerService/Execute"
_LOAD_WEIGHTS = "/quire.v1.AdminService/LoadWeights"
_MODELS = "/v1/models"
_MAX_LOGGED_CHARACTERS = 64
# What starlette's router raises.
_BAD_PATHS = {
    404: InvalidArgument("NO_SUCH_PATH", "", "nothing is served at this path"),
    405: InvalidArgument("BAD_METHOD", "", "the path does not support this method"),
}


class Middleware:
    """The outermost ASGI application. Passes permitted requests on to `app`."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator | None, state: ServerState, listen: str
    ) -> None:
        self._app = app
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
        """Raises only cancellations. An error's reason is left in the scope, for traces."""
        request = Request(scope, receive)
        own = request.headers.get(_REQUEST_ID, "")
        request_id = own if own and is_request_id(own) else secrets.token_hex(8)
        bind_request_id(request_id)
        response = _Response(request, send, request_id)
        name = escaped(f"{request.method} {scope['path']}"[:_MAX_LOGGED_CHARACTERS])
        began_s = time.monotonic()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._running.add(task)
        held = contextlib.ExitStack()
        # More of them: which methods a path has.
        headers: Mapping[str, str] = {}
        try:
            self._admit(request, held)
            # With this key starlette's router raises HTTPException instead of sending a response.
            scope["app"] = self._app
            await self._app(scope, receive, response.send)
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
            error = _BAD_PATHS[failure.status_code]
            headers = failure.headers or {}
        except NOT_FAILURES:
            raise
        except BaseException:
            _log.exception("request failed unexpectedly", request=name)
            error = InternalError()
        finally:
            held.close()
            self._running.discard(task)
        self._state.call_log.refused(name, error, elapsed_ms(began_s))
        scope["quire.error"] = error.reason
        await response.fail(error, headers)

    def _admit(self, request: Request, held: contextlib.ExitStack) -> None:
        """Checks host, authentication and the limit of requests, until `held` ends. Raises QuireError."""
        # Not the path of `request.url`: that is built from the Host header.
        path = request.scope["path"]
        if path.endswith("\n"):
            # Starlette's router takes it for the path without, which may need another role.
            raise _BAD_PATHS[404]
        if path == HEALTH:
            return
        if self._is_local_only and not is_address(request.headers.get("host", "")):
            text = "without authentication the Host header must be an IP address or localhost"
            raise InvalidArgument("BAD_HOST", "", text)
        if path in page.PATHS:
            return
        if self._authenticator is not None:
            method = _LIST if path.startswith(_MODELS) else _EXECUTE
            if path in weight_transfer.PATHS | adapter_calls.PATHS:
                method = _LOAD_WEIGHTS
            tokens = request.headers.getlist(AUTHORIZATION)
            if not tokens and path.startswith(MESSAGES):
                tokens = [f"Bearer {key}" for key in request.headers.getlist(_API_KEY)]
            # Not by the tenant in the context: that may be of an earlier request on this connection.
            if not self._authenticator.authenticate(method, [(AUTHORIZATION, token) for token in tokens]):
                self._authenticator.authenticate_by_certificate(
                    method, connection_of(request.scope).identities()
                )
        if self._has_stopped:
            raise Draining
        # Without authentication the context may have the tenant of nobody.
        tenant = None if self._authenticator is None else current_tenant()
        held.enter_context(self._state.budgets.of(tenant).http.held())


class _Response:
    """The response to a request, with how far it is."""

    def __init__(self, request: Request, send: Send, request_id: str) -> None:
        self._request = request
        self._send = send
        self._request_id = request_id
        self._has_begun = self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = [*message["headers"], (_REQUEST_ID.encode(), self._request_id.encode())]
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            if connection_of(self._request.scope).is_receiving:
                # The rest of the body is not read.
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    async def fail(self, error: QuireError, headers: Mapping[str, str]) -> None:
        """Sends an error in the form that fits: a response, an event of the stream, or an abort."""
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
