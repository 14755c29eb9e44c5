"""Matches the calls of one Session stream with their results; the streams are in `session.py`.

This module does not block or do I/O. Every call ends with its result, or with SessionEnded when the stream
ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message
from quire import _calls, _methods
from quire._methods import Method
from quire.errors import InternalError, QuireError, ResourceExhausted, SessionEnded, from_status
from quire.v1 import executor_pb2

# Calls are split into several messages of at most this size.
_TARGET_MESSAGE_BYTES = 1 << 20
# The maximum size of a protobuf field's tag and length.
_FIELD_HEADER_BYTES = 6
# The maximum size that a message of one call adds to its request: two fields around it, the call's tag, and
# its timeout.
_CALL_OVERHEAD_BYTES = 2 * _FIELD_HEADER_BYTES + 11 + 20

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_AnyFuture = TypeVar(
    "_AnyFuture",
    "asyncio.Future[executor_pb2.SessionResult]",
    "concurrent.futures.Future[executor_pb2.SessionResult]",
)


def _session_ended(cause: QuireError | None) -> SessionEnded:
    """A new exception, because each caller raises its own."""
    unavailable = grpc.StatusCode.UNAVAILABLE
    if cause is None:
        return SessionEnded(unavailable, "", "the session is closed")
    error = SessionEnded(
        unavailable,
        cause.reason,
        f"the session has ended: {cause}",
        metadata=cause.metadata,
        retry_delay_s=cause.retry_delay_s,
    )
    error.__cause__ = cause
    return error


@dataclass(slots=True)
class _PendingCall(Generic[_AnyFuture]):
    """An unanswered call. `answer` is cancelled if its caller stops waiting."""

    request: Message
    # None: no caller waits.
    answer: _AnyFuture | None


class PendingCalls(Generic[_AnyFuture]):
    """The calls of one stream, from when they are made until they are answered.

    Not thread-safe. Calls `notify` when `next_message` has something to return, and `on_done` with the number
    of callers' calls that have ended.
    """

    def __init__(
        self,
        max_request_bytes: int,
        max_calls_per_message: int,
        notify: Callable[[], object],
        on_done: Callable[[int], object],
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_calls_per_message = max_calls_per_message
        self._notify = notify
        self._on_done = on_done
        self._calls: dict[int, _PendingCall[_AnyFuture]] = {}
        self._unsent: deque[executor_pb2.SessionCall] = deque()
        self._next_tag = 0
        self._closing = False
        self._ended = False
        self._cause: QuireError | None = None

    def add(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        answer: _AnyFuture,
        timeout_s: float | None = None,
    ) -> None:
        """Queues a call. `timeout_s` is how long its caller waits; it is sent to the server.

        Raises ResourceExhausted if the request is too large, and SessionEnded if the stream is closed.
        """
        if self._closing or self._ended:
            raise _session_ended(self._cause)
        size_bytes = request.ByteSize()
        if size_bytes + _CALL_OVERHEAD_BYTES > self._max_request_bytes:
            # The server would end the stream for all callers.
            raise ResourceExhausted(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "",
                f"a request of {size_bytes} bytes is too large for messages of {self._max_request_bytes}",
            )
        self._add(method.field, request, answer, timeout_s)

    def _add(
        self, field: str, request: Message, answer: _AnyFuture | None, timeout_s: float | None = None
    ) -> None:
        tag = self._next_tag
        call = executor_pb2.SessionCall(**{"tag": tag, field: request})  # type: ignore[arg-type]
        if timeout_s is not None:
            call.timeout.FromNanoseconds(max(1, int(timeout_s * 1e9)))
        self._next_tag += 1
        self._calls[tag] = _PendingCall(request, answer)
        self._unsent.append(call)
        self._notify()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send and the stream stays open."""
        return not self._unsent and not self._is_finished

    @property
    def _is_finished(self) -> bool:
        return self._ended or (self._closing and not self._calls)

    def next_message(self) -> executor_pb2.SessionRequest | None:
        """Removes queued calls that fit into one message. None: the stream is finished."""
        if self._is_finished:
            return None
        limit_bytes = min(_TARGET_MESSAGE_BYTES, self._max_request_bytes)
        message = executor_pb2.SessionRequest()
        size_bytes = 0
        while self._unsent and len(message.calls) < self._max_calls_per_message:
            call_bytes = self._unsent[0].ByteSize() + _FIELD_HEADER_BYTES
            if size_bytes and size_bytes + call_bytes > limit_bytes:
                break
            message.calls.append(self._unsent.popleft())
            size_bytes += call_bytes
        return message

    def answered(self, message: executor_pb2.SessionResponse) -> None:
        """Passes the results to their callers."""
        done = 0
        for result in message.results:
            call = self._calls.pop(result.tag, None)
            if call is None or call.answer is None:
                continue
            done += 1
            if call.answer.cancelled():
                self.release_abandoned(call.request, result)
            else:
                call.answer.set_result(result)
        self._on_done(done)
        if self._is_finished:
            self._notify()

    def release_abandoned(self, request: Message, result: executor_pb2.SessionResult) -> None:
        """Releases the caches that an abandoned call created, because its caller does not get their ids."""
        kind = result.WhichOneof("result")
        if _calls.own_request_ids(request) and kind not in (None, "error") and not self._ended:
            for cache_id in _calls.new_caches(request, getattr(result, kind)):
                release = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
                self._add(_methods.RELEASE_CACHE.field, release, None)

    def close(self) -> None:
        """Refuses further calls. The stream is finished when the pending ones are answered."""
        self._closing = True
        self._notify()

    def end(self, cause: QuireError | None) -> None:
        """Fails every pending call with SessionEnded, because the stream has ended."""
        self._ended = True
        self._cause = cause
        answers = [call.answer for call in self._calls.values() if call.answer is not None]
        self._calls.clear()
        self._unsent.clear()
        for answer in answers:
            if not answer.cancelled():
                answer.set_exception(_session_ended(cause))
        self._on_done(len(answers))
        self._notify()


def response_of(method: Method[_Request, _Response], result: executor_pb2.SessionResult) -> _Response:
    """The response in a result. Raises QuireError if it is an error."""
    kind = result.WhichOneof("result")
    if kind == "error":
        raise from_status(result.error)
    if kind != method.field:
        raise InternalError(grpc.StatusCode.INTERNAL, "", f"{method.field} was answered with {kind}")
    response: _Response = getattr(result, method.field)
    return response
