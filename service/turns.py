"""Turns at something that few can use at a time, such as processes and threads.

Tenants take turns, however many callers each has (`fair_queue.py`). Where callers have tenants, none uses
more than half at once, so that one whose work is slow does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Executor
from typing import TypeVar

from service.caches.requests import Priority
from service.fair_queue import FairQueue

_Result = TypeVar("_Result")


def share_of(most: int, tenant: Hashable, others: int = 0) -> int:
    """How many of `most` one tenant may have. An empty name, or None: callers cannot be told apart.

    `others`: how many other tenants have, of what is refused and not waited for. Of the rest it is half, so
    that two tenants cannot have all.
    """
    return most if tenant in ("", None) else (most - others + 1) // 2


class Turns:
    """Gives turns to waiting callers, up to `most` at once. Used from one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue = FairQueue()
        # Turns that are under way.
        self._held: Counter[Hashable] = Counter()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the context."""
        await self._begin(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    async def in_thread(self, tenant: Hashable, threads: Executor, work: Callable[[], _Result]) -> _Result:
        """Waits for a turn and runs `work` in a thread. The turn lasts as long, also if the caller leaves."""
        await self._begin(tenant)
        loop = asyncio.get_running_loop()

        def end(_: object) -> None:
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, tenant)

        try:
            running = threads.submit(work)
        except BaseException:
            self._end(tenant)
            raise
        running.add_done_callback(end)
        return await asyncio.wrap_future(running)

    async def _begin(self, tenant: Hashable) -> None:
        ticket = self._queue.add(tenant, Priority.NORMAL)
        self._give()
        try:
            await ticket.wake.wait()
        except asyncio.CancelledError:
            if ticket.is_waiting:
                self._queue.remove(ticket)
            else:
                self._end(tenant)
            raise

    def _end(self, tenant: Hashable) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._give()

    def _give(self) -> None:
        """Gives turns as long as there are any for a tenant that waits."""
        while self._held.total() < self._most and (ticket := self._queue.first_of(self._has_room)):
            self._queue.take(ticket)
            self._held[ticket.tenant] += 1
            ticket.wake.set()

    def _has_room(self, tenant: Hashable) -> bool:
        return self._held[tenant] < share_of(self._most, tenant)
