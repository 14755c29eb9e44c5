"""Reads requests with a timeout and a memory limit. Limits the number of open request streams.

grpc.aio reads the request of a unary call before it calls the handler. Until then the call can neither be
answered nor ended. A handler registered for a stream is called before anything has arrived, and reads the
request itself, so that a call whose request does not arrive can be ended with a status, and gRPC frees the
memory. On the wire both are the same.

An open stream may hold a partially received message for as long as it is open, and gRPC does not tell. So the
number of streams is limited.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from service.auth.authenticator import current_tenant
from service.budgets import Budgets
from service.config import Config
from service.errors import ArrivingFull, MessageTimeout, QuireError, SessionLimit, malformed_request
from service.logging import get_logger
from service.running_clock import RunningClock

_log = get_logger(__name__)
_END = grpc.aio.EOF
_Context = grpc.aio.ServicerContext[Any, Any]
TICK_S = 0.25
# Requests that arrive within this time are not counted: any number of callers may start at the same moment.
_SLOW_S = 1.0


class SlowRequests:
    """Owner of the calls, by their tasks, whose request has not arrived completely.

    Pure: the caller passes the time. It adds a call to `began_s`, with `now_s`, and removes it when the
    request has arrived or the call has ended. Methods for this would add two function calls to each request.

    gRPC does not tell how much of a message has arrived. So a request that is still arriving after a second
    counts with the largest allowed size, and the memory limit determines the number of slow requests. The
    newest are refused first, so that a client that sends many does not displace others.
    """

    def __init__(self, max_bytes: int, max_request_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        # One is always allowed, however large.
        self._max_slow = max(1, max_bytes // max_request_bytes)
        self._timeout_s = timeout_s
        self._clock = RunningClock(TICK_S)
        # When each call began, the oldest first.
        self.began_s: dict[Any, float] = {}
        # The end of the current tick: a tick that has already begun does not count.
        self.now_s = self._clock.now_s + TICK_S

    def tick(self, elapsed_s: float) -> list[tuple[Any, QuireError]]:
        """Advances the time. Removes and returns the calls to end now and their errors."""
        self._clock.tick(elapsed_s)
        self.now_s = self._clock.now_s + TICK_S
        late = self._older_than(self._timeout_s)
        slow = self._older_than(_SLOW_S - TICK_S)[len(late) :]
        expired: list[tuple[Any, QuireError]] = [(call, MessageTimeout(self._timeout_s)) for call in late]
        expired += [(call, ArrivingFull(self._max_bytes)) for call in slow[self._max_slow :]]
        for call, _ in expired:
            del self.began_s[call]
        return expired

    def _older_than(self, age_s: float) -> list[Any]:
        limit_s = self._clock.now_s - age_s
        return [call for call, _ in takewhile(lambda item: item[1] < limit_s, self.began_s.items())]


class RequestReceiver:
    """Owner of the calls whose requests are being read."""

    def __init__(self, config: Config, budgets: Budgets) -> None:
        self._slow_requests = SlowRequests(
            config.max_arriving_bytes, config.max_request_bytes, config.message_timeout_s
        )
        # Passed to `asyncio.current_task`: looking up the running loop would take 0.2 us per call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._budgets = budgets
        # Why tasks were cancelled. Each removes its entry when it handles the cancellation.
        self._cancelled: dict[asyncio.Task[Any], QuireError] = {}

    @property
    def arriving(self) -> int:
        """The number of requests that have not arrived completely."""
        return len(self._slow_requests.began_s)

    @property
    def streams(self) -> int:
        return self._budgets.streams.used

    async def request(self, _messages: object, context: _Context) -> Any:
        """Returns the message of a call, or the error that refuses it."""
        task: Any = asyncio.current_task(self._loop)
        waiting = self._slow_requests
        waiting.began_s[task] = waiting.now_s
        try:
            message = await context.read()
        except DecodeError:
            # Only from health and reflection: the deserializers of our own calls do not raise.
            return malformed_request()
        except asyncio.CancelledError:
            error = self._cancelled.pop(task, None)
            if error is None:
                raise
            task.uncancel()
            return error
        finally:
            waiting.began_s.pop(task, None)
        if message is _END:
            if context.cancelled():
                # The client disconnected, or the message was too large for gRPC.
                raise asyncio.CancelledError
            return malformed_request("the call has no message")
        return message

    async def stream(self, messages: Any, context: _Context) -> Any:
        """Returns the stream of messages of a call, or the error that refuses it."""
        try:
            self._budgets.of(current_tenant()).streams.take_until_done(1, context)
        except SessionLimit as error:
            return error.without_traceback()
        return messages

    async def watch(self, messages: object, context: _Context) -> Any:
        """As `request`, for a call whose stream of answers has no end."""
        try:
            self._budgets.watches.take_until_done(1, context)
        except SessionLimit as error:
            return error.without_traceback()
        return await self.request(messages, context)

    async def run(self) -> None:
        """Cancels requests that take too long, until cancelled itself."""
        self._loop = asyncio.get_running_loop()
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            expired = self._slow_requests.tick(now_s - before_s)
            before_s = now_s
            for task, error in expired:
                self._cancelled[task] = error
                task.cancel()
            if expired:
                _log.warning("requests did not arrive", calls=len(expired), still_arriving=self.arriving)
