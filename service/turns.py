"""Turns at something that few can use at a time, such as processes and threads.

Tenants take turns, however many callers each has (`fair_queue.py`). Where callers have tenants, none uses
more than half at once, so that one whose work is slow does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable

from service.caches.requests import Priority
from service.fair_queue import FairQueue


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
        await self.begin(tenant)
        try:
            yield
        finally:
            self.end(tenant)

    async def begin(self, tenant: Hashable) -> None:
        """Waits for a turn, which `end` ends: it may last longer than its caller waits."""
        ticket = self._queue.add(tenant, Priority.NORMAL)
        self._give()
        try:
            await ticket.wake.wait()
        except asyncio.CancelledError:
            if ticket.is_waiting:
                self._queue.remove(ticket)
            else:
                self.end(tenant)
            raise

    def end(self, tenant: Hashable) -> None:
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
