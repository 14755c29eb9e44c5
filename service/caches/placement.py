"""Which worker has the KV of each cache, preemption, and which worker takes a new sequence. No clock, no I/O.

KV can be dropped at any moment and is replayed when it is next needed. So the journal limits how many
caches there are. The pages of workers only limit how many can continue without a replay.

A sequence goes to a worker that has its weights loaded and has enough free pages: the one that has the least
to compute before the sequence is done. That is the work queued before it, and the part of its prefix that the
worker does not have. So a prefix is computed again elsewhere if that takes less time than waiting for a
worker that has it. Workers are assumed to be equally fast. Ties are decided by free pages, less those that
queued attempts will take.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from service.caches.effects import Context, ReleaseSequences, TruncateSequence
from service.caches.entries import CacheEntry, Need, Operation, WorkerView
from service.caches.worker_load import TYPICAL_PROMPT_TOKENS
from service.errors import NoWorker

# A cache that was not used for this long is idle. Longer than the pause between two steps of a caller.
_IDLE_S = 0.25
# A cache keeps its pages for this long before others can preempt it.
_MIN_PLACED_S = 2.0
# The granularity of prefixes. Coarser than most pages would lose hits; finer would find no more.
_AFFINITY_TOKENS = 16
_AFFINITY_BYTES = _AFFINITY_TOKENS * array("I").itemsize

# One incarnation of a worker: its id and its epoch.
Holder = tuple[str, int]


class KvPlacement:
    """Places the KV of caches. Only this class writes `CacheEntry.worker`, and what `WorkerView.held` has."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def assign(self, entry: CacheEntry, worker: WorkerView, kv_len: int = 0) -> None:
        """Assigns a cache to a worker, which has KV of its first `kv_len` tokens."""
        entry.ownership += 1
        self._place(entry, worker, kv_len)

    def adopt(self, entry: CacheEntry, worker: WorkerView, kept_len: int) -> bool:
        """Takes over the KV of a cache that a new worker has kept. Returns False if it cannot be used."""
        # The cache may have been cut and extended since the worker was asked to keep its KV. If its records
        # are with the journal, the cache will soon have tokens that the worker does not have.
        kv_len = min(kept_len, entry.unchanged_len)
        if entry.worker is not None or entry.is_committing or not kv_len:
            return False
        if entry.state.weights != worker.weights:
            return False
        if entry.placed_s != -math.inf:
            # It may have been on another worker in between.
            entry.ownership += 1
        self._place(entry, worker, kv_len)
        if kv_len < kept_len:
            self._context.send(worker, TruncateSequence(self._context.number(), entry.number, kv_len))
        return True

    def _place(self, entry: CacheEntry, worker: WorkerView, kv_len: int) -> None:
        assert entry.worker is None
        entry.worker, entry.placed_s, entry.was_sent = worker, self._context.now_s, kv_len > 0
        entry.has_kv(kv_len)
        worker.held[entry] = None

    def sent(self, entry: CacheEntry) -> None:
        """Notes that a command about the cache was sent to its worker."""
        entry.was_sent = True

    def truncated(self, entry: CacheEntry, new_len: int) -> None:
        """The cache was truncated: truncates the sequence in its worker."""
        entry.unchanged_len = min(entry.unchanged_len, new_len)
        if entry.worker is not None:
            if entry.kv_len > new_len:
                command = TruncateSequence(self._context.number(), entry.number, new_len)
                self._context.send(entry.worker, command)
            entry.has_kv(min(entry.kv_len, new_len))

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

    def lose(self, worker: WorkerView) -> None:
        for entry in list(worker.held):
            self._forget(entry, worker)

    def preempt(self, worker: WorkerView, pages: int, wanted_by: Operation) -> list[CacheEntry]:
        """Drops KV in LRU order until about `pages` are free. Returns the caches whose KV was dropped."""
        freed, evicted = 0, []
        for entry in worker.held:
            if freed >= pages:
                break
            if entry is not wanted_by.entry and self._is_preemptible(entry, wanted_by):
                # Shared pages stay in use, and a cache without known KV may have some. If too few are
                # free, the operation asks again.
                freed += max(1, worker.pages_for(min(entry.kv_len, entry.length)))
                evicted.append(entry)
        self.drop(*evicted)
        self._context.counts["preempted"] += len(evicted)
        return evicted

    def _is_preemptible(self, entry: CacheEntry, wanted_by: Operation) -> bool:
        running, now_s = entry.running, self._context.now_s
        # A cache with a fork that still waits for its turn on another cache is preemptible: that turn may
        # depend on the operation that needs these pages.
        if running is not None and not running.turns_left:
            # Both wait for pages: the older one may take those of the younger one. So there is no deadlock.
            return running.need is Need.PAGES and running.ticket > wanted_by.ticket
        return now_s - entry.used_s >= _IDLE_S or now_s - entry.placed_s >= _MIN_PLACED_S

    def _forget(self, entry: CacheEntry, worker: WorkerView) -> None:
        del worker.held[entry]
        entry.worker, entry.kv_len, entry.was_sent = None, 0, False


class PrefixAffinity:
    """Remembers which workers computed each prefix last, a few for each prefix. Bounded; only a hint."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._most_holders = 3
        # By digest of the prefix, the latest holder first.
        self._holders: OrderedDict[int, tuple[Holder, ...]] = OrderedDict()

    def record(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Notes that `worker` computes a sequence with these tokens."""
        name = (worker.worker_id, worker.epoch)
        for digest in _prefix_digests(token_ids, salt):
            others = [holder for holder in self._holders.get(digest, ()) if holder != name]
            self._holders[digest] = (name, *others[: self._most_holders - 1])
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def held(self, token_ids: Sequence[int], salt: bytes = b"") -> dict[Holder, int]:
        """How many of these tokens, from the first on, each worker has computed, as far as is known."""
        found: dict[Holder, int] = {}
        for count, digest in enumerate(_prefix_digests(token_ids, salt), start=1):
            holders = self._holders.get(digest)
            if holders is None:
                break
            for holder in holders:
                found[holder] = count * _AFFINITY_TOKENS
        return found


def _prefix_digests(token_ids: Sequence[int], salt: bytes) -> Iterable[int]:
    """Chained hashes of the prefixes under a salt. Python's own hash is enough for a hint."""
    packed = array("I", token_ids).tobytes()
    digest = hash(salt)
    for end in range(_AFFINITY_BYTES, len(packed) + 1, _AFFINITY_BYTES):
        digest = hash((digest, packed[end - _AFFINITY_BYTES : end]))
        yield digest


class Workers:
    """Owns the ready workers: the current incarnation of each."""

    def __init__(self) -> None:
        # Whether any worker has ever been ready. Before that, creations are refused.
        self.were_ready = False
        self._workers: dict[str, WorkerView] = {}
        self.affinity = PrefixAffinity()

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def add(self, worker: WorkerView) -> None:
        """Adds a ready worker. Raises ValueError if its previous incarnation was not removed."""
        if worker.worker_id in self._workers:
            raise ValueError(f"worker {worker.worker_id} is ready already")
        self._workers[worker.worker_id] = worker
        worker.is_ready = self.were_ready = True

    def find(self, worker_id: str, epoch: int) -> WorkerView | None:
        """One incarnation of a worker, if it is ready."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def remove(self, worker: WorkerView) -> None:
        del self._workers[worker.worker_id]
        worker.is_ready = False

    def open_workers(self, weights: int) -> list[WorkerView]:
        """The workers that take new sequences of these weights."""
        return [worker for worker in self if worker.weights == weights and not worker.draining]

    def preferred(self, weights: int) -> list[WorkerView]:
        """As `open_workers`, without the suspects unless there are no others."""
        there = self.open_workers(weights)
        return [worker for worker in there if not worker.suspect] or there

    def expected_wait_s(self, weights: int, tokens: int = TYPICAL_PROMPT_TOKENS) -> float:
        """The estimated queueing delay of a new sequence. inf: no worker takes it."""
        workers = self.open_workers(weights)
        return min((worker.load.expected_wait_s(tokens) for worker in workers), default=math.inf)

    def choose(self, token_ids: Sequence[int], salt: bytes = b"", weights: int = 0) -> WorkerView:
        """The worker for a sequence that starts with `token_ids`. Raises NoWorker if there is none.

        Only sequences of the same salt share prefixes. The worker may have too few pages: then it refuses the
        attempt and reports how many are missing.
        """
        preferred = self.preferred(weights)
        if not preferred:
            raise NoWorker
        # If none has the capacity, any of them refuses with the reason.
        fitting = [w for w in preferred if w.capacity_tokens >= len(token_ids)] or preferred
        known = self.affinity.held(token_ids, salt)
        held = {w: known.get((w.worker_id, w.epoch), 0) for w in fitting}
        with_room = [
            w for w in fitting if w.headroom >= w.pages_for(len(token_ids)) - held[w] // w.page_tokens
        ]

        def cost(worker: WorkerView) -> tuple[int, int, int]:
            missing = max(len(token_ids) - held[worker], 1)
            return worker.load.total_for(missing), -worker.headroom, len(worker.held)

        return min(with_room or fitting, key=cost if with_room else lambda w: (-w.headroom, len(w.held)))
