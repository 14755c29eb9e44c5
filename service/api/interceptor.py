"""Wraps every call: authentication, reading the request, its ids, the log line, errors as statuses.

Unauthenticated calls are refused before the request is read.
This is the outermost wrapper, so it handles every exception. A QuireError becomes its status with rich
details. Any other exception becomes INTERNAL with the request id and without the exception's text. A
CancelledError that the caller did not cause is answered too, because the call would hang otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

import grpc
from grpc_status import rpc_status

from service.api.call_log import elapsed_ms
from service.api.parsing import LargeRequest, deferring_deserializer
from service.api.server_state import ServerState
from service.api.status import to_status
from service.api.trace_context import TRACEPARENT, trace_id_of
from service.api.validation import MAX_REQUEST_ID_CHARS, is_request_id
from service.auth.authenticator import Authenticator, current_tenant
from service.errors import NOT_FAILURES, InternalError, NoWorker, QuireError
from service.logging import bind_request_id, bind_trace_id, get_logger
from service.printable import escaped

_log = get_logger(__name__)
_PREFIX = "/quire.v1."
# The longest method name in the log. An unauthenticated caller may send any name.
_MAX_LOGGED_CHARS = 64
REQUEST_ID_METADATA = "x-request-id"
# gRPC cancels within milliseconds. If it takes longer, the call is logged as failed instead of cancelled.
_LEAVING_S = 1.0

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
# Returns the answer of a call, or writes a stream of answers itself.
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
Observing: TypeAlias = Callable[[str, Behaviour], Behaviour]
# Returns the argument of a behaviour: a request or a stream of requests; or the error that refuses the call.
Receive: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


# For each shape of a call: the handler's attribute that has its behaviour, and the function that makes the
# wrapped handler. gRPC sees every request as a stream, see request_receiver.py.
_SHAPES = {
    (False, False): ("unary_unary", grpc.stream_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.stream_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all calls. For health and reflection, only reads the request."""

    def __init__(
        self,
        state: ServerState,
        authenticator: Authenticator | None = None,
        observing: Sequence[Observing] = (),
    ) -> None:
        """`observing`: further wrappers of each method's behaviour, to count or trace its calls."""
        self._observing = observing
        self._state = state
        self._receiver = state.receiver
        self._call_log = state.call_log
        self._authenticator = authenticator
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        if self._authenticator is not None:
            try:
                self._authenticator.authenticate(method, handler_call_details.invocation_metadata)
            except QuireError as error:
                return self.refusing_handler(method, error)
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        # None for an unknown method, unlike in the type stubs.
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        place, make = _SHAPES[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, place)
        if handler.response_streaming:
            behaviour = _writing_stream(behaviour)
        deserializer = cast(Callable[[bytes], Any], handler.request_deserializer)
        serializer = handler.response_serializer
        receive: Receive = self._receiver.stream if handler.request_streaming else self._receiver.request
        if method.startswith(_PREFIX):
            if self._authenticator is not None:
                receive = _receive_authenticated(method, receive, self._authenticator)
            behaviour = self._own_behaviour(method, behaviour, receive)
            deserializer = deferring_deserializer(deserializer, self._state)
        else:
            if handler.response_streaming and not handler.request_streaming:
                receive = self._receiver.watch
            behaviour = self._third_party_behaviour(method, behaviour, receive)
        behaviour = self._observed(method, behaviour)
        if not handler.response_streaming:
            behaviour = _AwaitableFunction(behaviour)
        return make(behaviour, deserializer, serializer)

    def refusing_handler(self, method: str, error: QuireError) -> Handler:
        """A handler that refuses a call of any shape without reading its request."""

        async def refuse(_messages: Any, _context: Context) -> QuireError:
            return error

        behaviour = self._own_behaviour(method, _unreachable, refuse)
        return grpc.stream_stream_rpc_method_handler(self._observed(method, behaviour))

    def _observed(self, method: str, behaviour: Behaviour) -> Behaviour:
        for observe in self._observing:
            behaviour = observe(method, behaviour)
        return behaviour

    def _third_party_behaviour(self, method: str, behaviour: Behaviour, receive: Receive) -> Behaviour:
        """Wraps a behaviour of another library's service, which handles its own errors."""
        rpc = _name(method)

        async def handle(messages: Any, context: Context) -> Any:
            request = await receive(messages, context)
            if isinstance(request, QuireError):
                self._call_log.refused(rpc, request, 0.0)
                await context.abort(*_abort_arguments(request))
            return await behaviour(request, context)

        return handle

    def _own_behaviour(self, method: str, behaviour: Behaviour, receive: Receive) -> Behaviour:
        rpc, call_log = _name(method), self._call_log

        async def handle(messages: Any, context: Context) -> Any:  # noqa: RET503 - abort does not return
            try:
                request = await receive(messages, context)
                if isinstance(request, LargeRequest):
                    request = await request.parse()
            except BaseException as error:
                request = _failure_of(error, rpc)
            request_id = _request_id(getattr(request, "request_id", ""), context)
            bind_request_id(request_id)
            started_s = time.monotonic()
            try:
                if isinstance(request, QuireError):
                    raise request
                response = await behaviour(request, context)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    call_log.cancelled(rpc, elapsed_ms(started_s))
                    raise
                # Another task's cancellation was raised here. Without an answer the caller would hang.
                failure: QuireError = NoWorker()
            except BaseException as error:
                failure = _failure_of(error, rpc)
            else:
                if call_log.has_successes:
                    call_log.done(rpc, started_s)
                return response
            call_log.refused(rpc, failure, elapsed_ms(started_s))
            end = _abort_arguments(failure, request_id)
            # grpc keeps the exception of an abort in a reference cycle, and with it this frame.
            del messages, request, failure
            await context.abort(*end)

        return handle


class _AwaitableFunction(functools.partial[Any]):
    """A coroutine function that grpc recognises as such faster.

    Twice per call, grpc checks whether the handler is awaitable; if not, it checks by five functions of
    `inspect` whether it is a coroutine function. It handles both in the same way.
    """

    def __await__(self) -> Any:
        raise AssertionError("grpc calls the handler, it does not await it")


async def _unreachable(_request: Any, _context: Context) -> None:
    raise AssertionError("a refused call reached its handler")


def _receive_authenticated(method: str, receive: Receive, authenticator: Authenticator) -> Receive:
    """Authenticates a call without a token by its certificate before reading its request."""

    async def authenticate_and_receive(messages: Any, context: Context) -> Any:
        if current_tenant() is None:
            try:
                authenticator.authenticate_by_certificate(method, context.auth_context())
            except QuireError as error:
                return error
        return await receive(messages, context)

    return authenticate_and_receive


def _name(method: str) -> str:
    return escaped(method.rpartition("/")[2][:_MAX_LOGGED_CHARS])


def _failure_of(error: BaseException, rpc: str) -> QuireError:
    """The error that the caller gets for an exception. Reraises exceptions that are no failures."""
    if isinstance(error, QuireError):
        return error.without_traceback()
    if isinstance(error, NOT_FAILURES):
        raise error
    _log.error("call failed unexpectedly", rpc=rpc, exc_info=error)
    return InternalError()


def _abort_arguments(
    failure: QuireError, request_id: str = ""
) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    status = rpc_status.to_status(to_status(failure, request_id))
    metadata = [*status.trailing_metadata]
    if failure.code == "UNAVAILABLE":
        # For gRPC's own retries: the delay before a retry, or -1 for none.
        wait_ms = -1 if failure.retry_after_s is None else int(failure.retry_after_s * 1000)
        metadata.append(("grpc-retry-pushback-ms", str(wait_ms)))
    return status.code, status.details, tuple(metadata)


def _writing_stream(
    behaviour: Callable[[Any, Context], Awaitable[Any] | AsyncGenerator[Any, None]],
) -> Behaviour:
    """Wraps a behaviour that answers with a stream. If it is a generator, writes its messages."""

    async def handle(request: Any, context: Context) -> Any:
        call = behaviour(request, context)
        try:
            if isinstance(call, Awaitable):
                return await call
            async with contextlib.aclosing(call) as messages:
                async for message in messages:
                    await context.write(message)
        except grpc.aio.InternalError:
            # A message could not be written. If the caller has disconnected, this task will be cancelled.
            await asyncio.sleep(_LEAVING_S)
            raise
        return None

    return handle


def _request_id(own: str, context: Context) -> str:
    """The caller's request id: `own`, or that of the metadata. A new one if it is not printable.

    Also binds the id of the caller's trace.
    """
    given = own
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_METADATA and isinstance(value, str) and not given:
            own = value[:MAX_REQUEST_ID_CHARS]
        elif key == TRACEPARENT and (trace_id := trace_id_of(value)) is not None:
            bind_trace_id(trace_id)
    return own if own and is_request_id(own) else os.urandom(8).hex()
