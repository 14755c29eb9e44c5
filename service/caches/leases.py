"""When the leases of caches run out: found without a look at the caches whose leases run on. No clock."""

from __future__ import annotations

import heapq

from service.caches.entries import CacheEntry


class LeaseEnds:
    """Owns the order of the ends. Each use of a cache moves its end on, which is noticed when it is due.

    Caches are in buckets of a second. Only an end that comes earlier than before has to be told: `moved`.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, dict[CacheEntry, None]] = {}
        # The keys of the buckets, as a heap.
        self._seconds: list[int] = []
        self._bucket_of: dict[CacheEntry, dict[CacheEntry, None]] = {}
        # Those that were due while they were in use.
        self._in_use: dict[CacheEntry, None] = {}

    def add(self, entry: CacheEntry) -> None:
        """A cache with a lease. It is in no bucket."""
        second = int(min(entry.expires_at_s, 1e18))
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = {}
            heapq.heappush(self._seconds, second)
        bucket[entry] = None
        self._bucket_of[entry] = bucket

    def remove(self, entry: CacheEntry) -> None:
        """It was released. Idempotent."""
        bucket = self._bucket_of.pop(entry, None)
        if bucket is not None:
            bucket.pop(entry, None)
            if not bucket:
                # An empty dict keeps the memory of what was in it.
                bucket.clear()

    def moved(self, entry: CacheEntry) -> None:
        """The lease of a cache was set to another time."""
        if entry in self._bucket_of:
            self.remove(entry)
            self.add(entry)

    def due(self, now_s: float, at_most: int | None = None) -> list[CacheEntry]:
        """Unused caches whose leases have run out. One that is not released is due again the next time."""
        for entry in [entry for entry in self._in_use if not entry.busy]:
            self.moved(entry)
        found: list[CacheEntry] = []
        later: list[CacheEntry] = []
        while self._seconds and self._seconds[0] <= now_s and len(found) != at_most:
            bucket = self._buckets[self._seconds[0]]
            while bucket and len(found) != at_most:
                entry, _ = bucket.popitem()
                if entry.expires_at_s > now_s:
                    later.append(entry)
                elif entry.busy:
                    self._in_use[entry] = None
                    self._bucket_of[entry] = self._in_use
                else:
                    found.append(entry)
            if not bucket:
                del self._buckets[heapq.heappop(self._seconds)]
        for entry in (*later, *found):
            self.add(entry)
        return found
