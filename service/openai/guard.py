"""What surrounds every request: the doors, a request id, the log line, and the mapping of errors.

As the interceptor does for gRPC: who has no business here is refused before anything of a body is read, and
nothing escapes but errors in OpenAI's form, with nothing of an exception's text.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.server_state import ServerState
from service.api.validation import is_request_id
from service.config import is_private
from service.doors.doors import AUTHORIZATION, Doors
from service.errors import NOT_FAILURES, InternalError, InvalidArgument, QuireError, SessionLimit
from service.logging import bind_request_id, get_logger
from service.openai import errors
from service.openai.connection import connection_of
from service.openai.generation import event
from service.printable import escaped

_log = get_logger(__name__)
HEALTH = "/health"
_REQUEST_ID = "x-request-id"
# The calls of gRPC that say as much: the doors know what each needs.
_LIST = "/quire.v1.ModelRunnerService/ListRuntimes"
_EXECUTE = "/quire.v1.ModelRunnerService/Execute"
_MODELS = "/v1/models"
_MAX_LOGGED_CHARACTERS = 64


class Guard:
    """The outermost ASGI application. Whoever is let in goes on to `app`."""

    def __init__(self, app: ASGIApp, doors: Doors | None, state: ServerState) -> None:
        self._app = app
        self._doors = doors
        self._state = state
        self._is_local_only = doors is None and is_private(state.config.openai_listen)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Never raises what is not a cancellation."""
        request = Request(scope)
        own = request.headers.get(_REQUEST_ID, "")
        request_id = own if own and is_request_id(own) else secrets.token_hex(8)
        bind_request_id(request_id)
        exchange = _Exchange(request, receive, send, request_id)
        began_s = time.monotonic()
        self._running += 1
        try:
            failure = await self._handled(exchange, scope)
        except asyncio.CancelledError:
            self._state.refusals.cancelled(exchange.name, _elapsed_ms(began_s))
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The client has left; nobody reads what could be answered.
            connection_of(scope).abort()
            return
        finally:
            self._running -= 1
        if failure is not None:
            self._state.refusals.refused(exchange.name, failure, _elapsed_ms(began_s))
            await exchange.fail(failure)

    async def _handled(self, exchange: _Exchange, scope: Scope) -> QuireError | None:
        """Lets a request in, and has it answered. Why it failed, if it did."""
        try:
            self._enter(exchange.request)
            # Else it would answer by itself where nothing is found.
            scope["app"] = self._app
            await self._app(scope, exchange.receive, exchange.send)
        except QuireError as error:
            return error.untraced()
        except HTTPException as error:
            return errors.bad_method() if error.status_code == 405 else errors.no_such_path()
        except NOT_FAILURES:
            raise
        except BaseException:
            _log.exception("request failed unexpectedly", request=exchange.name)
            return InternalError()
        return None

    def _enter(self, request: Request) -> None:
        """Raises QuireError for who may not come in."""
        path = request.scope["path"]
        # Not that of `request.url`: a Host header is a part of it.
        if path == HEALTH:
            return
        if self._is_local_only and not _is_local(request.headers.get("host", "")):
            # A page of others whose name has become this machine's could read all answers.
            text = "without tokens the server is asked by an address, or as localhost"
            raise InvalidArgument("BAD_HOST", "", text)
        if self._doors is not None:
            method = _LIST if path.startswith(_MODELS) else _EXECUTE
            tokens = request.headers.getlist(AUTHORIZATION)
            self._doors.enter(method, [(AUTHORIZATION, token) for token in tokens])
            # Not by whom the context names: that may be who asked before on this connection.
            if not tokens:
                self._doors.enter_by_certificate(method, connection_of(request.scope).identities())
        most = self._state.config.max_sessions
        if self._running > most:
            raise SessionLimit(most)


class _Exchange:
    """A request and its answer: what of both has passed."""

    def __init__(self, request: Request, receive: Receive, send: Send, request_id: str) -> None:
        self.request = request
        method, path = request.method, request.scope["path"]
        self.name = escaped(f"{method} {path}"[:_MAX_LOGGED_CHARACTERS])
        self._receive = receive
        self._send = send
        self._request_id = request_id
        length = request.headers.get("content-length", "0")
        self._has_more = length != "0" or "transfer-encoding" in request.headers
        self._has_begun = self._is_stream = False

    async def receive(self) -> Message:
        """Of the request."""
        message = await self._receive()
        self._has_more = self._has_more and bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        """Of the answer."""
        if message["type"] == "http.response.start":
            self._has_begun = True
            headers = [*message["headers"], (_REQUEST_ID.encode(), self._request_id.encode())]
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
            if self._has_more:
                # Nobody will read the rest.
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    async def fail(self, error: QuireError) -> None:
        """Tells of a failure, where the answer is now."""
        if not self._has_begun:
            response = JSONResponse(errors.body(error), errors.http_status(error), errors.headers(error))
            await response(self.request.scope, self.receive, self.send)
        elif self._is_stream:
            await self._send({"type": "http.response.body", "body": event(errors.body(error))})
        else:
            connection_of(self.request.scope).abort()


def _is_local(host: str) -> bool:
    """Whether a Host header is an address, or localhost."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _elapsed_ms(began_s: float) -> float:
    return round((time.monotonic() - began_s) * 1000, 3)
