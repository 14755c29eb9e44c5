"""What surrounds every call of ours: the doors, a request id, the log line, and the mapping of errors.

Who has no business here is refused before anything of the call is read. How that is done, and for how long,
is the reception's, for the calls of other services too.
Outermost, so that nothing escapes it: a QuireError becomes its status with rich details; any other exception
becomes INTERNAL with the request id and nothing of its text; a CancelledError that is not the caller's own is
answered too, since otherwise the call would hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
from grpc_status import rpc_status

from service.api.parsing import Large, Malformed, MessageLimits, tolerant
from service.api.reception import Reception
from service.api.refusal_log import RefusalLog
from service.api.status import to_status
from service.api.validation import MAX_REQUEST_ID_CHARS, is_request_id
from service.config import Config
from service.doors.doors import Doors, current_tenant
from service.errors import NOT_FAILURES, InternalError, NoWorker, QuireError
from service.logging import bind_request_id, get_logger, tells_details
from service.printable import escaped

_log = get_logger(__name__)
_PREFIX = "/quire.v1."
# Of a name that a caller may have made up.
_MAX_LOGGED_CHARS = 64
REQUEST_ID_METADATA = "x-request-id"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
# A coroutine that returns its answer, or writes a stream of them by itself; or a generator of a stream.
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any] | AsyncIterator[Any]]
# Gives a behaviour what it is for: a request or a stream of them, or Malformed if there is none.
Take: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


# Each shape of a call: where a handler has its behaviour, and what makes the one we answer with. To gRPC the
# request of each is a stream, see reception.py.
_SHAPES = {
    (False, False): ("unary_unary", grpc.stream_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.stream_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers of every shape: our own; those of others (health, reflection) as far as they read."""

    def __init__(
        self,
        limits: MessageLimits | None = None,
        doors: Doors | None = None,
        reception: Reception | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        self._limits = limits or MessageLimits()
        self._doors = doors
        self._reception = reception or Reception(Config())
        self._refusals = refusals or RefusalLog()
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        if self._doors is not None:
            try:
                self._doors.enter(method, handler_call_details.invocation_metadata)
            except QuireError as error:
                return _refusing(method, error, self._refusals)
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        # None for an unknown method, whatever the stubs say.
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        place, make = _SHAPES[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, place)
        deserializer = cast(Callable[[bytes], Any], handler.request_deserializer)
        take = self._reception.stream if handler.request_streaming else self._reception.request
        if method.startswith(_PREFIX):
            behaviour = _surround(method, behaviour, take, self._doors, self._refusals)
            deserializer = tolerant(deserializer, self._limits)
        else:
            behaviour = _received(method, behaviour, take, self._refusals)
        return make(behaviour, deserializer, handler.response_serializer)


def _refusing(method: str, error: QuireError, refusals: RefusalLog) -> Handler:
    """A handler that reads nothing of a call, whatever its shape, and ends it."""

    async def refuse(_messages: Any, _context: Context) -> Malformed:
        return Malformed(error)

    return grpc.stream_stream_rpc_method_handler(_surround(method, _never, refuse, None, refusals))


async def _never(_request: Any, _context: Context) -> None:
    raise AssertionError("nothing was taken that could be handled")


def _received(method: str, behaviour: Behaviour, take: Take, refusals: RefusalLog) -> Behaviour:
    """A behaviour of somebody else's, whose errors are its own."""
    rpc = _name(method)

    async def handle(messages: Any, context: Context) -> Any:
        request = await take(messages, context)
        if isinstance(request, Malformed):
            refusals.refused(rpc, request.error, 0.0)
            await context.abort(*_end(request.error))
        return await _finished(behaviour(request, context), context)

    return handle


def _refused_at_the_doors(method: str, context: Context, doors: Doors | None) -> QuireError | None:
    """Why a call that came without a token may not go on, if so."""
    if doors is not None and current_tenant() is None:
        try:
            doors.enter_by_certificate(method, context.auth_context())
        except QuireError as error:
            return error
    return None


def _name(method: str) -> str:
    return escaped(method.rpartition("/")[2][:_MAX_LOGGED_CHARS])


def _surround(
    method: str, behaviour: Behaviour, take: Take, doors: Doors | None, refusals: RefusalLog
) -> Behaviour:
    rpc = _name(method)

    async def handle(messages: Any, context: Context) -> Any:  # noqa: RET503 - abort does not return
        stranger = _refused_at_the_doors(method, context, doors)
        request = await take(messages, context) if stranger is None else Malformed(stranger)
        if isinstance(request, Large):
            request = await request.parsed()
        request_id = _request_id(request, context)
        bind_request_id(request_id)
        started_s = time.monotonic()
        try:
            if isinstance(request, Malformed):
                raise request.error
            response = await _finished(behaviour(request, context), context)
        except QuireError as error:
            failure = error.untraced()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                refusals.cancelled(rpc, _elapsed_ms(started_s))
                raise
            # Somebody else's cancellation leaked in; unanswered it would hang the caller.
            failure = NoWorker()
        except BaseException as error:
            failure = _unexpected(error, rpc)
        else:
            if tells_details():
                _log.debug("call done", rpc=rpc, duration_ms=_elapsed_ms(started_s))
            return response
        refusals.refused(rpc, failure, _elapsed_ms(started_s))
        end = _end(failure, request_id)
        # grpc keeps the exception with which it aborts, and so this frame, in a cycle until a collection.
        del messages, request, failure
        await context.abort(*end)

    return handle


def _unexpected(error: BaseException, rpc: str) -> QuireError:
    """What the caller is told of anything else. Raises what is no failure of the call."""
    if isinstance(error, NOT_FAILURES):
        raise error
    _log.error("call failed unexpectedly", rpc=rpc, exc_info=error)
    return InternalError()


def _end(failure: QuireError, request_id: str = "") -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    """What a call is aborted with."""
    status = rpc_status.to_status(to_status(failure, request_id))
    return status.code, status.details, (*status.trailing_metadata, *_pushback(failure))


def _pushback(failure: QuireError) -> tuple[tuple[str, str], ...]:
    """Tells gRPC's own retries of what may pass when to come again, and not to of what will not."""
    if failure.code != "UNAVAILABLE":
        return ()
    wait_ms = -1 if failure.retry_after_s is None else int(failure.retry_after_s * 1000)
    return (("grpc-retry-pushback-ms", str(wait_ms)),)


async def _finished(call: Awaitable[Any] | AsyncIterator[Any], context: Context) -> Any:
    """Waits for a call of either style. Streams end without an answer of their own."""
    if isinstance(call, Awaitable):
        return await call
    async with contextlib.aclosing(cast(AsyncGenerator[Any, None], call)) as messages:
        async for message in messages:
            await context.write(message)
    return None


def _request_id(request: Any, context: Context) -> str:
    """The caller's own id, from the request or the metadata, or a new one if that cannot be shown."""
    own = getattr(request, "request_id", "")
    if not own:
        for key, value in context.invocation_metadata() or ():
            if key == REQUEST_ID_METADATA and isinstance(value, str):
                own = value[:MAX_REQUEST_ID_CHARS]
    return own if own and is_request_id(own) else secrets.token_hex(8)


def _elapsed_ms(started_s: float) -> float:
    return round((time.monotonic() - started_s) * 1000, 3)
