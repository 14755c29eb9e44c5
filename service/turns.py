"""Turns at something that few can use at a time, such as processes and threads.

Tenants take turns, however many callers each has. Where callers have tenants, none uses more than half at
once, so that one whose work is slow does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable


def share_of(most: int, tenant: Hashable, others: int = 0) -> int:
    """How many of `most` one tenant may have. An empty name, or None: callers cannot be told apart.

    `others`: how many other tenants have, of what is refused and not waited for. Of the rest it is half, so
    that two tenants cannot have all.
    """
    return most if tenant in ("", None) else (most - others + 1) // 2


class Turns:
    """Gives turns to waiting callers, up to `most` at once. Used from one event loop.

    Next is the tenant that has had the fewest turns. One that comes, or comes again, counts as having had as
    many as who was last: idle time earns none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By tenant: the callers that wait, each with what wakes it.
        self._waiting: dict[Hashable, deque[asyncio.Event]] = {}
        # Turns that are under way; and that each tenant has had, up to that of the last one.
        self._held: Counter[Hashable] = Counter()
        self._had: dict[Hashable, int] = {}
        self._last = 0

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
        wake = asyncio.Event()
        if tenant not in self._waiting:
            # Without those that would count as new ones.
            kept = self._waiting.keys() | {one for one, had in self._had.items() if had > self._last}
            self._had = {one: self._had[one] for one in kept}
            self._had[tenant] = max(self._had.get(tenant, 0), self._last)
        self._waiting.setdefault(tenant, deque()).append(wake)
        self._give()
        try:
            await wake.wait()
        except asyncio.CancelledError:
            if wake.is_set():
                self.end(tenant)
            else:
                self._waiting[tenant].remove(wake)
                self._drop_if_empty(tenant)
            raise

    def end(self, tenant: Hashable) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._give()

    def _give(self) -> None:
        """Gives turns as long as there are any for a tenant that waits."""
        while self._held.total() < self._most:
            present = [one for one in self._waiting if self._held[one] < share_of(self._most, one)]
            if not present:
                return
            tenant = min(present, key=self._had.__getitem__)
            self._last = self._had[tenant]
            self._had[tenant] += 1
            self._held[tenant] += 1
            self._waiting[tenant].popleft().set()
            self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: Hashable) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
