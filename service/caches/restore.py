"""After a worker is lost, replays recently used caches before they are requested.

Few at a time, and only on workers with many free pages, so that requests are not delayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from service.caches.entries import CacheEntry, Change, Operation
from service.caches.kind import BaseKind, Parts
from service.caches.requests import Handles, Restore

# A cache that was not used for so long is replayed only on request.
_LATELY_S = 60.0
_AT_ONCE_PER_WORKER = 2


class Restores(BaseKind[Restore]):
    """Owns the caches that wait to be restored, and the running restores."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.waiting: deque[CacheEntry] = deque()
        self.under_way: set[Operation] = set()

    def later(self, entries: Sequence[CacheEntry]) -> None:
        """Queues caches whose KV was dropped, given in LRU order."""
        now_s = self._parts.context.now_s
        self.waiting.extendleft(e for e in entries if e.visible and now_s - e.used_s < _LATELY_S)

    def forget(self, weights: int) -> None:
        """Removes the caches of these weights."""
        self.waiting = deque(entry for entry in self.waiting if entry.state.weights != weights)

    def next(self) -> CacheEntry | None:
        """The next cache to restore now, the last used first. None: none for now, or the server stops."""
        while self.waiting and not self._parts.admission.draining:
            there = self._parts.workers.open_workers(self.waiting[0].state.weights)
            if len(self.under_way) >= _AT_ONCE_PER_WORKER * len(there):
                break
            entry = self.waiting.popleft()
            idle = entry.visible and entry.worker is None and not entry.busy
            suspicious = entry.quarantined or entry.crash_score
            # Only where it leaves enough pages for others.
            if idle and not suspicious and any(w.headroom >= 2 * w.pages_for(entry.length) for w in there):
                return entry
        return None

    def _begin(self, operation: Operation, request: Restore) -> Change | None:
        state = operation.entry.state
        is_there = self._parts.attempts.begin(operation, state.length, state.prompt_len)
        return Handles(()) if is_there else None

    def computed(self, operations: Sequence[Operation]) -> list[Change]:
        return [Handles(()) for _ in operations]
