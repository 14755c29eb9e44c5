"""The stream under a Session: for threads, and for the tasks of an event loop.

Calls that are made while a message is being sent go together into the next one, and so run together. Nobody
waits for good: when the stream ends, however it ends, every call that is not answered raises SessionEnded,
and so does every later one. The bound on calls in flight lies below the server's own, and answers are read as
they come, so neither end has to stop the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from quire._ledger import Ledger, response_of
from quire._methods import Method
from quire.errors import Cancelled, DeadlineExceeded, QuireError, from_rpc_error
from quire.v1 import executor_pb2

__all__ = ["AsyncSessionStream", "SessionStream"]

# A quarter of the calls that a server holds for one session by default.
DEFAULT_MAX_IN_FLIGHT = 256
DEFAULT_CLOSE_TIMEOUT_S = 10.0
# Between cancelling a stream and its end, which needs no answer from the server.
_CANCEL_TIMEOUT_S = 5.0

# What goes with the stream.
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Result = executor_pb2.SessionResult


class SessionStream:
    """A stream for use by several threads. One thread of its own reads the answers, one of gRPC's writes."""

    def __init__(
        self,
        open_stream: grpc.StreamStreamMultiCallable[
            executor_pb2.SessionRequest, executor_pb2.SessionResponse
        ],
        *,
        metadata: Metadata | None,
        timeout_s: float | None,
        max_in_flight: int,
        max_request_bytes: int,
    ) -> None:
        """Opens the stream; whether a server is there shows with the first call."""
        self._timeout_s = timeout_s
        self._room = threading.Semaphore(_at_least_one(max_in_flight))
        # Guards the ledger; notified when there is something to send.
        self._news = threading.Condition()
        self._ledger: Ledger[concurrent.futures.Future[_Result]] = Ledger(
            max_request_bytes, self._news.notify, lambda count: self._room.release(count) if count else None
        )
        self._stream = open_stream(self._outgoing(), metadata=metadata)
        # A daemon, so that a program can end without closing its sessions.
        self._reader = threading.Thread(target=self._read, name="quire-session", daemon=True)
        self._reader.start()

    def call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        """Makes a call and waits for its answer. Raises QuireError."""
        began_s = time.monotonic()
        answer: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        if not self._room.acquire(timeout=self._timeout_s):
            raise _too_late(self._timeout_s)
        try:
            with self._news:
                self._ledger.add(method, request, answer, self._left_s(began_s))
        except QuireError:
            self._room.release()
            raise
        try:
            return response_of(method, answer.result(self._left_s(began_s)))
        except TimeoutError:
            self._abandon(request, answer)
            raise _too_late(self._timeout_s) from None
        except KeyboardInterrupt:
            self._abandon(request, answer)
            raise

    def close(self, timeout_s: float) -> None:
        """Lets open calls be answered, for `timeout_s` at most, and ends the stream. Can be called again."""
        with self._news:
            self._ledger.close()
        self._reader.join(timeout_s)
        self.cancel()
        self._reader.join(_CANCEL_TIMEOUT_S)

    def cancel(self) -> None:
        """Ends the stream at once, without waiting; takes no lock, so that a finalizer may call it."""
        self._stream.cancel()

    def _left_s(self, began_s: float) -> float | None:
        return None if self._timeout_s is None else self._timeout_s - (time.monotonic() - began_s)

    def _abandon(self, request: Message, answer: concurrent.futures.Future[_Result]) -> None:
        with self._news:
            if not answer.cancel() and answer.exception() is None:
                self._ledger.disown(request, answer.result())

    def _outgoing(self) -> Iterator[executor_pb2.SessionRequest]:
        while True:
            with self._news:
                self._news.wait_for(lambda: not self._ledger.is_quiet)
                message = self._ledger.next_message()
            if message is None:
                return
            yield message

    def _read(self) -> None:
        cause: QuireError | None = None
        try:
            for message in self._stream:
                with self._news:
                    self._ledger.answered(message)
        except grpc.RpcError as error:
            cause = from_rpc_error(error)
        finally:
            with self._news:
                self._ledger.end(cause)


class AsyncSessionStream:
    """A stream for the tasks of the event loop in which it was made."""

    def __init__(
        self,
        open_stream: grpc.aio.StreamStreamMultiCallable[
            executor_pb2.SessionRequest, executor_pb2.SessionResponse
        ],
        *,
        metadata: Metadata | None,
        timeout_s: float | None,
        max_in_flight: int,
        max_request_bytes: int,
    ) -> None:
        """Opens the stream; whether a server is there shows with the first call."""
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(_at_least_one(max_in_flight))
        self._news = asyncio.Event()
        self._ledger: Ledger[asyncio.Future[_Result]] = Ledger(
            max_request_bytes, self._news.set, self._give_room
        )
        self._loop = asyncio.get_running_loop()
        self._stream = open_stream(self._outgoing(), metadata=metadata)
        self._first_status: grpc.aio.AioRpcError | None = None
        self._stream.add_done_callback(self._keep_first_status)
        self._reader = self._loop.create_task(self._read(), name="quire-session")

    async def call(self, method: Method[_Request, _Response], request: _Request) -> _Response:
        """Makes a call and waits for its answer. Raises QuireError."""
        answer: asyncio.Future[_Result] = self._loop.create_future()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._room.acquire()
                try:
                    until_s = limit.when()
                    left_s = None if until_s is None else until_s - self._loop.time()
                    self._ledger.add(method, request, answer, left_s)
                except QuireError:
                    self._room.release()
                    raise
                return response_of(method, await answer)
        except TimeoutError:
            self._abandon(request, answer)
            raise _too_late(self._timeout_s) from None
        except asyncio.CancelledError:
            self._abandon(request, answer)
            raise

    async def close(self, timeout_s: float) -> None:
        """Lets open calls be answered, for `timeout_s` at most, and ends the stream. Can be called again."""
        self._ledger.close()
        try:
            await asyncio.wait({self._reader}, timeout=timeout_s)
        finally:
            self._stream.cancel()
        await asyncio.wait({self._reader}, timeout=_CANCEL_TIMEOUT_S)

    def cancel(self) -> None:
        """Ends the stream soon, without waiting. For finalizers, which run in any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed, and the stream with it.
            self._loop.call_soon_threadsafe(self._stream.cancel)

    def _abandon(self, request: Message, answer: asyncio.Future[_Result]) -> None:
        # An answer may have come in the very moment in which its caller was cancelled.
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._ledger.disown(request, answer.result())

    def _give_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()

    async def _outgoing(self) -> AsyncIterator[executor_pb2.SessionRequest]:
        while True:
            while self._ledger.is_quiet:
                self._news.clear()
                await self._news.wait()
            message = self._ledger.next_message()
            if message is None:
                return
            yield message

    async def _read(self) -> None:
        cause: QuireError | None = None
        try:
            async for message in self._stream:
                self._ledger.answered(message)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INTERNAL and self._first_status is not None:
                error = self._first_status
            cause = from_rpc_error(error)
        except asyncio.CancelledError:
            # The stream was, or the loop is coming to its end; either way this task ends here.
            cause = _cut_off()
        finally:
            self._ledger.end(cause)

    def _keep_first_status(self, stream: Any) -> None:
        """Keeps what the server said when it ended the stream.

        If a message was being sent at that moment, grpcio may replace the status by INTERNAL "Internal error
        from Core" right after it came (grpc/grpc issue 36066).
        """
        code, details = _result_of(stream.code()), _result_of(stream.details())
        trailing = _result_of(stream.trailing_metadata())
        self._first_status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for: a callback cannot await it."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("the status of a call that is done is known")


def _at_least_one(max_in_flight: int) -> int:
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
    return max_in_flight


def _too_late(timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "", f"no answer within {timeout_s} s")


def _cut_off() -> Cancelled:
    return Cancelled(grpc.StatusCode.CANCELLED, "", "cancelled by this client")
