"""Receives what callers send: requests, within a time and a budget, and streams, as many as may be open.

grpc.aio awaits the request of a unary call by itself, and whoever waits there can neither be answered nor
ended. A handler that is said to take a stream is called before anything has arrived, and reads by itself: a
request that does not arrive then ends with a status of ours, and gRPC lets go of what it holds of it. On the
wire both are the same.

Of a stream that stays open nobody can tell a caller who is silent from one who is in the middle of a message:
it may hold one for as long as it is open, so their number is bounded.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from service.api.arrivals import BEAT_S, Arrivals
from service.api.parsing import Malformed
from service.config import Config
from service.errors import InvalidArgument, QuireError, SessionLimit
from service.logging import get_logger

_log = get_logger(__name__)
_END = grpc.aio.EOF
_Context = grpc.aio.ServicerContext[Any, Any]


class Reception:
    """Owner of who is being listened to."""

    def __init__(self, config: Config) -> None:
        self._arrivals: Arrivals[asyncio.Task[Any]] = Arrivals(
            config.max_arriving_bytes, config.max_request_bytes, config.message_timeout_s
        )
        # Whose tasks are asked for. None is the running one, and looking that up costs each call 0.2 us.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_streams = config.max_sessions
        self.streams = 0
        # Why calls are given up, from the verdict until each has met it.
        self._given_up: dict[asyncio.Task[Any], QuireError] = {}

    @property
    def arriving(self) -> int:
        """How many requests have not arrived."""
        return len(self._arrivals)

    async def request(self, _messages: object, context: _Context) -> Any:
        """The one message of a call, or why there is none."""
        task: Any = asyncio.current_task(self._loop)
        self._arrivals.begin(task)
        try:
            message = await context.read()
        except DecodeError:
            # Of others' messages: ours are taken as they are, and looked at later.
            return Malformed()
        except asyncio.CancelledError:
            error = self._given_up.pop(task, None)
            if error is None:
                raise
            task.uncancel()
            return Malformed(error)
        finally:
            self._arrivals.end(task)
        if message is _END:
            if context.cancelled():
                # Its caller has left in the middle of it, or it was too large for gRPC.
                raise asyncio.CancelledError
            return Malformed(InvalidArgument("MALFORMED_REQUEST", "", "the call has no message"))
        return message

    async def stream(self, messages: Any, context: _Context) -> Any:
        """The messages of a call as they come, or why they are not listened to."""
        if self.streams >= self._max_streams:
            return Malformed(SessionLimit(self._max_streams))
        self.streams += 1
        context.add_done_callback(self._on_done)  # type: ignore[arg-type]
        return messages

    def _on_done(self, _context: _Context) -> None:
        self.streams -= 1

    async def run(self) -> None:
        """Gives up what takes too long, until cancelled."""
        self._loop = asyncio.get_running_loop()
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.monotonic()
            given_up = self._arrivals.beat(now_s - before_s)
            before_s = now_s
            for task, error in given_up:
                self._given_up[task] = error
                task.cancel()
            if given_up:
                _log.warning("requests did not arrive", calls=len(given_up), still_arriving=self.arriving)
