"""The stream of a Session: for threads, and for the tasks of an event loop.

Calls that are made while a message is being sent go into the next message together, and so are batched. When
the stream ends, for any reason, every unanswered call raises SessionEnded, and so does every later one. The
limit on calls in flight is below the server's own, and responses are read immediately, so the server never
stops reading.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from quire._calls import limit_s
from quire._grpc_aio import FirstStatus
from quire._methods import Method
from quire._pending_calls import PendingCalls, response_of
from quire.errors import Cancelled, DeadlineExceeded, QuireError, from_rpc_error
from quire.v1 import executor_pb2

__all__ = ["AsyncSessionStream", "SessionStream"]

# A quarter of a server's default limit on the calls of one session.
DEFAULT_MAX_IN_FLIGHT = 256
# A server's default limit.
DEFAULT_MAX_CALLS_PER_MESSAGE = 4096
DEFAULT_CLOSE_TIMEOUT_S = 10.0
# The maximum time for a cancelled stream to end. It does not depend on the server.
_CANCEL_TIMEOUT_S = 5.0

# The metadata of the stream.
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Result = executor_pb2.SessionResult


class SessionStream:
    """A stream for several threads. Its own thread reads responses; a thread of gRPC sends requests."""

    def __init__(
        self,
        open_stream: grpc.StreamStreamMultiCallable[
            executor_pb2.SessionRequest, executor_pb2.SessionResponse
        ],
        *,
        metadata: Metadata | None,
        timeout_s: float | None,
        max_in_flight: int,
        max_calls_per_message: int,
        max_request_bytes: int,
        proxy: str = "",
    ) -> None:
        """Opens the stream. If the server is unreachable, the first call fails.

        `proxy`: that of the server, for messages.
        """
        self._timeout_s = timeout_s
        self._proxy = proxy
        self._slots = threading.Semaphore(_at_least_one(max_in_flight))
        # Guards the pending calls. Notified when there is something to send.
        self._condition = threading.Condition()
        self._pending: PendingCalls[concurrent.futures.Future[_Result]] = PendingCalls(
            max_request_bytes,
            max_calls_per_message,
            self._condition.notify,
            lambda count: self._slots.release(count) if count else None,
        )
        self._stream = open_stream(self._outgoing(), metadata=metadata)
        # A daemon thread, so that a program can exit without closing its sessions.
        self._reader = threading.Thread(target=self._read, name="quire-session", daemon=True)
        self._reader.start()

    def call(
        self, method: Method[_Request, _Response], request: _Request, timeout_s: float | None = None
    ) -> _Response:
        """Makes a call and waits for its response. `timeout_s`: None is the stream's. Raises QuireError."""
        timeout_s = limit_s(timeout_s, self._timeout_s)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        answer: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        if not self._slots.acquire(timeout=timeout_s):
            raise _deadline_exceeded(timeout_s)
        try:
            with self._condition:
                self._pending.add(method, request, answer, _left_s(deadline_s))
        except QuireError:
            self._slots.release()
            raise
        try:
            result = answer.result(_left_s(deadline_s))
        except TimeoutError:
            self._abandon(request, answer)
            raise _deadline_exceeded(timeout_s) from None
        except BaseException:  # what a signal's handler raises, such as KeyboardInterrupt
            self._abandon(request, answer)
            raise
        return response_of(method, result)

    def close(self, timeout_s: float | None) -> None:
        """Waits up to `timeout_s` for pending calls, then ends the stream. Idempotent."""
        with self._condition:
            self._pending.close()
        self._reader.join(timeout_s)
        self.cancel()
        self._reader.join(_CANCEL_TIMEOUT_S)

    def cancel(self) -> None:
        """Cancels the stream without waiting. Takes no lock, so that a finalizer can call it."""
        self._stream.cancel()

    def _abandon(self, request: Message, answer: concurrent.futures.Future[_Result]) -> None:
        with self._condition:
            if not answer.cancel() and answer.exception() is None:
                self._pending.release_abandoned(request, answer.result())

    def _outgoing(self) -> Iterator[executor_pb2.SessionRequest]:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: not self._pending.is_idle)
                message = self._pending.next_message()
            if message is None:
                return
            yield message

    def _read(self) -> None:
        cause: QuireError | None = None
        try:
            for message in self._stream:
                with self._condition:
                    self._pending.answered(message)
        except grpc.RpcError as error:
            cause = from_rpc_error(error, self._proxy)
        finally:
            with self._condition:
                self._pending.end(cause)


class AsyncSessionStream:
    """A stream for the tasks of the event loop in which it was created."""

    def __init__(
        self,
        open_stream: grpc.aio.StreamStreamMultiCallable[
            executor_pb2.SessionRequest, executor_pb2.SessionResponse
        ],
        *,
        metadata: Metadata | None,
        timeout_s: float | None,
        max_in_flight: int,
        max_calls_per_message: int,
        max_request_bytes: int,
        proxy: str = "",
    ) -> None:
        """Opens the stream. If the server is unreachable, the first call fails.

        `proxy`: that of the server, for messages.
        """
        self._timeout_s = timeout_s
        self._proxy = proxy
        self._slots = asyncio.Semaphore(_at_least_one(max_in_flight))
        self._wakeup = asyncio.Event()
        self._pending: PendingCalls[asyncio.Future[_Result]] = PendingCalls(
            max_request_bytes, max_calls_per_message, self._wakeup.set, self._release_slots
        )
        self._loop = asyncio.get_running_loop()
        self._stream = open_stream(self._outgoing(), metadata=metadata)
        self._first_status = FirstStatus(self._stream)
        self._reader = self._loop.create_task(self._read(), name="quire-session")

    async def call(
        self, method: Method[_Request, _Response], request: _Request, timeout_s: float | None = None
    ) -> _Response:
        """Makes a call and waits for its response. `timeout_s`: None is the stream's. Raises QuireError."""
        timeout_s = limit_s(timeout_s, self._timeout_s)
        answer: asyncio.Future[_Result] = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._slots.acquire()
                try:
                    until_s = limit.when()
                    left_s = None if until_s is None else until_s - self._loop.time()
                    self._pending.add(method, request, answer, left_s)
                except QuireError:
                    self._slots.release()
                    raise
                return response_of(method, await answer)
        except TimeoutError:
            self._abandon(request, answer)
            raise _deadline_exceeded(timeout_s) from None
        except asyncio.CancelledError:
            self._abandon(request, answer)
            raise

    async def close(self, timeout_s: float | None) -> None:
        """Waits up to `timeout_s` for pending calls, then ends the stream. Idempotent."""
        self._pending.close()
        try:
            await asyncio.wait({self._reader}, timeout=timeout_s)
        finally:
            self._stream.cancel()
        await asyncio.wait({self._reader}, timeout=_CANCEL_TIMEOUT_S)

    def cancel(self) -> None:
        """Cancels the stream without waiting. Thread-safe, because finalizers run in any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and so is the stream.
            self._loop.call_soon_threadsafe(self._stream.cancel)

    def _abandon(self, request: Message, answer: asyncio.Future[_Result]) -> None:
        # The response may have arrived just before the caller was cancelled.
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._pending.release_abandoned(request, answer.result())

    def _release_slots(self, count: int) -> None:
        for _ in range(count):
            self._slots.release()

    async def _outgoing(self) -> AsyncIterator[executor_pb2.SessionRequest]:
        while True:
            while self._pending.is_idle:
                self._wakeup.clear()
                await self._wakeup.wait()
            message = self._pending.next_message()
            if message is None:
                return
            yield message

    async def _read(self) -> None:
        cause: QuireError | None = None
        try:
            async for message in self._stream:
                self._pending.answered(message)
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(self._first_status.instead_of(error), self._proxy)
        except asyncio.CancelledError:
            # The stream was cancelled, or the event loop is being closed.
            cause = Cancelled(grpc.StatusCode.CANCELLED, "", "cancelled by this client")
        finally:
            self._pending.end(cause)


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else deadline_s - time.monotonic()


def _at_least_one(max_in_flight: int) -> int:
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
    return max_in_flight


def _deadline_exceeded(timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "", f"no answer within {timeout_s} s")
