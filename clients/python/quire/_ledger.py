"""The calls of one Session stream, and which answer is whose; the streams are in `session.py`.

Nothing here waits or sends. Whatever ends the stream, every call in the ledger is settled: with its answer,
or with SessionEnded.
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

# A message of calls that would be larger is sent in several.
_TARGET_MESSAGE_BYTES = 1 << 20
# At most what the key and the length of a field add to it.
_FRAME_BYTES = 6
# As much as a request becomes larger by being the only call of a message: two fields around it, a tag, and
# its time limit.
_WRAPPING_BYTES = 2 * _FRAME_BYTES + 11 + 20

# A year. The server takes a longer one as none.
_NO_LIMIT_S = 365 * 86_400

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_AnyFuture = TypeVar(
    "_AnyFuture",
    "asyncio.Future[executor_pb2.SessionResult]",
    "concurrent.futures.Future[executor_pb2.SessionResult]",
)


def _session_ended(cause: QuireError | None) -> SessionEnded:
    """A new exception: each caller raises one of its own."""
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
class _OpenCall(Generic[_AnyFuture]):
    """A call that is not answered yet. `answer` is cancelled if its caller waits no more."""

    request: Message
    # None: nobody ever waited.
    answer: _AnyFuture | None


class Ledger(Generic[_AnyFuture]):
    """The calls of one stream, from when they are made until they are answered.

    Not safe for use by several threads at once. `has_news` is called when `next_message` has become worth
    calling, `left` with the number of callers' calls that are not open any more.
    """

    def __init__(
        self, max_request_bytes: int, has_news: Callable[[], object], left: Callable[[int], object]
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._has_news = has_news
        self._left = left
        self._open: dict[int, _OpenCall[_AnyFuture]] = {}
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
        """Takes a call to send. `timeout_s`: how long its caller waits for it, which the server is told.

        Raises ResourceExhausted if it is too large, and SessionEnded if the stream takes no more calls.
        """
        if self._closing or self._ended:
            raise _session_ended(self._cause)
        size_bytes = request.ByteSize()
        if size_bytes + _WRAPPING_BYTES > self._max_request_bytes:
            # Sent, it would end the stream for all its callers.
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
        if timeout_s is not None and timeout_s < _NO_LIMIT_S:
            call.timeout.FromNanoseconds(max(1, int(timeout_s * 1e9)))
        self._next_tag += 1
        self._open[tag] = _OpenCall(request, answer)
        self._unsent.append(call)
        self._has_news()

    @property
    def is_quiet(self) -> bool:
        """Nothing is there to be sent, and the stream is to stay open."""
        return not self._unsent and not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._ended or (self._closing and not self._open)

    def next_message(self) -> executor_pb2.SessionRequest | None:
        """Takes what waits to be sent, as much as should go into one message. None: no more is to come."""
        if self._is_over:
            return None
        limit_bytes = min(_TARGET_MESSAGE_BYTES, self._max_request_bytes)
        message = executor_pb2.SessionRequest()
        size_bytes = 0
        while self._unsent:
            call_bytes = self._unsent[0].ByteSize() + _FRAME_BYTES
            if size_bytes and size_bytes + call_bytes > limit_bytes:
                break
            message.calls.append(self._unsent.popleft())
            size_bytes += call_bytes
        return message

    def answered(self, message: executor_pb2.SessionResponse) -> None:
        """Hands results to those who wait for them."""
        left = 0
        for result in message.results:
            call = self._open.pop(result.tag, None)
            if call is None or call.answer is None:
                continue
            left += 1
            if call.answer.cancelled():
                self.disown(call.request, result)
            else:
                call.answer.set_result(result)
        self._left(left)
        if self._is_over:
            self._has_news()

    def disown(self, request: Message, result: executor_pb2.SessionResult) -> None:
        """Releases the caches that an answer has made and that nobody will hear of."""
        if not self._ended:
            for cache_id in _calls.new_caches(request, result):
                release = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
                self._add(_methods.RELEASE_CACHE.field, release, None)

    def close(self) -> None:
        """Takes no more calls; the stream is over when those that are open are answered."""
        self._closing = True
        self._has_news()

    def end(self, cause: QuireError | None) -> None:
        """The stream has ended, and so has every call of it."""
        self._ended = True
        self._cause = cause
        waited_for = [call.answer for call in self._open.values() if call.answer is not None]
        self._open.clear()
        self._unsent.clear()
        for answer in waited_for:
            if not answer.cancelled():
                answer.set_exception(_session_ended(cause))
        self._left(len(waited_for))
        self._has_news()


def response_of(method: Method[_Request, _Response], result: executor_pb2.SessionResult) -> _Response:
    """What the call would have returned on its own, or raised."""
    kind = result.WhichOneof("result")
    if kind == "error":
        raise from_status(result.error)
    if kind != method.field:
        raise InternalError(grpc.StatusCode.INTERNAL, "", f"{method.field} was answered with {kind}")
    response: _Response = getattr(result, method.field)
    return response
