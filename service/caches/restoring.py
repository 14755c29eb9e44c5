"""Which caches are computed again before anyone asks: after a loss, those that were used lately. Pure.

Few at a time, and only where there is room, so that they take nothing from who asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from service.caches.entries import CacheEntry
from service.caches.placement import Placement

# Who has not been used for so long can wait until he is.
_LATELY_S = 60.0
_AT_ONCE_PER_WORKER = 2


class Restoring:
    """Owner of the caches that wait to be restored, and of how many just are."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._waiting: deque[CacheEntry] = deque()
        self.under_way = 0

    def __bool__(self) -> bool:
        """Whether any wait."""
        return bool(self._waiting)

    def later(self, entries: Sequence[CacheEntry], now_s: float) -> None:
        """Caches have lost their home; the last was used last."""
        lately = [e for e in entries if e.visible and now_s - e.used_s < _LATELY_S]
        self._waiting.extendleft(lately)

    def forget(self, weights: int) -> None:
        """Nothing is computed with these any more."""
        self._waiting = deque(entry for entry in self._waiting if entry.state.weights != weights)

    def next(self) -> CacheEntry | None:
        """One that is to be restored now, the one used last first. None: none is, for now."""
        while self._waiting:
            there = self._placement.open_workers(self._waiting[0].state.weights)
            if self.under_way >= _AT_ONCE_PER_WORKER * len(there):
                break
            entry = self._waiting.popleft()
            idle = entry.visible and entry.home is None and not entry.busy
            suspicious = entry.quarantined or entry.strikes
            # Not where it would take what others need.
            if idle and not suspicious and any(w.headroom >= 2 * w.pages_for(entry.length) for w in there):
                return entry
        return None
