"""The caches in the order in which they became visible, so that a page of them costs what it holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from service.caches.entries import CacheEntry

# As few are not worth a clean-up.
_FEW = 64


class Listing:
    """Reads the table's entries. Ids of those that are gone stay until they are as many as the others."""

    def __init__(self, entries: Mapping[str, CacheEntry]) -> None:
        self._entries = entries
        self._orders: list[int] = []
        self._cache_ids: list[str] = []

    def add(self, entry: CacheEntry) -> None:
        """A cache became visible. Its order is the highest so far."""
        if len(self._orders) > 2 * len(self._entries) + _FEW:
            self._orders = [entry.order for entry in self._entries.values()]
            self._cache_ids = list(self._entries)
        self._orders.append(entry.order)
        self._cache_ids.append(entry.cache_id)

    def after(self, order: int) -> Iterator[CacheEntry]:
        """The caches of a higher order, in order."""
        for index in range(bisect_right(self._orders, order), len(self._orders)):
            entry = self._entries.get(self._cache_ids[index])
            if entry is not None:
                yield entry
