"""Calls of a Session for caches of other shards.

Each runs in a task of its own. Calls for one cache still run in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from service.api.calls import ids_in
from service.api.other_shards import OtherShards, RunHere
from service.errors import NOT_FAILURES, InternalError, QuireError
from service.logging import get_logger

_log = get_logger(__name__)


class SessionCallContext:
    """Stands in for the gRPC context of a call within a Session."""

    def __init__(self, stream: Any, timeout_s: float | None) -> None:
        self._stream = stream
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._callbacks: list[Callable[[Any], None]] = []

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def invocation_metadata(self) -> Any:
        return self._stream.invocation_metadata()

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Does nothing: calls of a Session have no metadata."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


class SessionCallsOfOthers:
    """See `SessionCalls`."""

    def __init__(self, others: OtherShards, stream: Any, here: RunHere) -> None:
        """`stream`: the context of the Session."""
        self._others = others
        self._stream = stream
        self._here = here
        # The last unfinished call of each cache.
        self._last: dict[str, asyncio.Task[None]] = {}

    def must_answer(self, method: str, request: Any) -> bool:
        return self._others.must_answer(method, request) or (
            bool(self._last) and not self._last.keys().isdisjoint(ids_in(method, request))
        )

    def start(
        self, method: str, request: Any, timeout_s: float | None, on_done: Callable[[Any], None]
    ) -> asyncio.Task[None]:
        context = SessionCallContext(self._stream, timeout_s)
        ids = [cache_id for cache_id in ids_in(method, request) if cache_id]
        before = {self._last[cache_id] for cache_id in ids if cache_id in self._last}

        async def run() -> None:
            if before:
                await asyncio.wait(before)
            try:
                outcome = await self._others.answer(method, request, context, self._here)
            except QuireError as error:
                outcome = error
            except NOT_FAILURES:
                raise
            except BaseException:
                _log.exception("a call could not be answered", call=method)
                outcome = InternalError()
            finally:
                context.end()
            on_done(outcome)

        def forget(ended: asyncio.Task[None]) -> None:
            for cache_id in ids:
                if self._last.get(cache_id) is ended:
                    del self._last[cache_id]

        task = asyncio.get_running_loop().create_task(run())
        self._last.update(dict.fromkeys(ids, task))
        task.add_done_callback(forget)
        return task
