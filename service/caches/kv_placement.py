"""Which worker has the KV of each cache, and preemption. Pure: no clock, no I/O.

KV can be dropped at any moment and is replayed when it is next needed. So the journal limits how many
caches there are. The pages of workers only limit how many can continue without a replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from service.caches.effects import Context, ReleaseSequences, TruncateSequence
from service.caches.entries import CacheEntry, Need, Operation, WorkerView

# A cache that was not used for so long is idle. It is longer than the pause between two steps of a caller.
_IDLE_S = 0.25
# If pages are scarce, a cache keeps its pages for so long before others can preempt it.
_MIN_PLACED_S = 2.0


class KvPlacement:
    """Places the KV of caches: it alone writes which worker has it, and what the worker holds."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def assign(self, entry: CacheEntry, worker: WorkerView, kv_len: int = 0) -> None:
        """Assigns a cache to a worker, which has KV of its first `kv_len` tokens."""
        entry.ownership += 1
        self._place(entry, worker, kv_len)

    def adopt(self, entry: CacheEntry, worker: WorkerView, kept_len: int) -> bool:
        """Uses the KV of a cache that a new worker has kept. Returns False if it cannot be used."""
        # The cache may have been cut and extended since the worker was asked to keep the KV. If records are
        # with the journal, the cache will soon have tokens that the worker does not have.
        kv_len = min(kept_len, entry.unchanged_len)
        if entry.worker is not None or entry.is_committing or not kv_len:
            return False
        if entry.state.weights != worker.weights:
            return False
        if entry.placed_s != -math.inf:
            # It may have been on another worker since that one had it.
            entry.ownership += 1
        self._place(entry, worker, kv_len)
        if kv_len < kept_len:
            self._context.send(worker, TruncateSequence(self._context.number(), entry.number, kv_len))
        return True

    def _place(self, entry: CacheEntry, worker: WorkerView, kv_len: int) -> None:
        assert entry.worker is None
        entry.worker, entry.kv_len, entry.placed_s = worker, kv_len, self._context.now_s
        entry.was_sent = kv_len > 0
        worker.held[entry] = None

    def sent(self, entry: CacheEntry) -> None:
        """A command about the cache is sent to its worker."""
        entry.was_sent = True

    def extended(self, entries: Iterable[CacheEntry]) -> None:
        """What workers have computed was appended to these caches."""
        for entry in entries:
            if entry.worker is not None:
                entry.kv_len = entry.state.tokens.length

    def truncated(self, entry: CacheEntry, new_len: int) -> None:
        """The cache was cut. Cuts the sequence in its worker."""
        entry.unchanged_len = min(entry.unchanged_len, new_len)
        if entry.worker is not None and entry.kv_len > new_len:
            entry.kv_len = new_len
            self._context.send(entry.worker, TruncateSequence(self._context.number(), entry.number, new_len))

    def drop(self, *entries: CacheEntry) -> None:
        """Drops the KV of caches, with one command to each worker."""
        sent: dict[WorkerView, list[int]] = {}
        for entry in entries:
            worker = entry.worker
            if worker is not None:
                if entry.was_sent:
                    sent.setdefault(worker, []).append(entry.number)
                self._forget(entry, worker)
        for worker, numbers in sent.items():
            self._context.send(worker, ReleaseSequences(self._context.number(), numbers))

    def lose(self, worker: WorkerView) -> list[CacheEntry]:
        """Drops all KV of a lost worker. Returns its caches in LRU order."""
        lost = list(worker.held)
        for entry in lost:
            self._forget(entry, worker)
        return lost

    def preempt(self, worker: WorkerView, pages: int, wanted_by: Operation) -> bool:
        """Drops KV in LRU order until about `pages` are free. Returns False if there was none to drop."""
        freed, evicted = 0, []
        for entry in worker.held:
            if freed >= pages:
                break
            if entry is not wanted_by.entry and self._is_preemptible(entry, wanted_by):
                # Shared pages stay in use. If too few are free, the operation asks again.
                freed += max(1, worker.pages_for(entry.kv_len))
                evicted.append(entry)
        self.drop(*evicted)
        self._context.counts["preempted"] += len(evicted)
        return freed > 0

    def _is_preemptible(self, entry: CacheEntry, wanted_by: Operation) -> bool:
        """Whether its KV may be dropped for an operation."""
        running, now_s = entry.running, self._context.now_s
        # A fork that waits for its turn on another cache may wait for the operation that needs these pages.
        if running is not None and not running.turns_left:
            # Of those that wait for pages the oldest may take those of the others: no deadlock.
            return running.need is Need.PAGES and running.ticket > wanted_by.ticket
        return now_s - entry.used_s >= _IDLE_S or now_s - entry.placed_s >= _MIN_PLACED_S

    def _forget(self, entry: CacheEntry, worker: WorkerView) -> None:
        del worker.held[entry]
        entry.worker, entry.kv_len, entry.was_sent = None, 0, False
