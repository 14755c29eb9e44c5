"""The workers that are ready, and the choice of one for a sequence. Pure: no clock, no I/O.

A sequence goes to a worker that has loaded its weights. The worker that computed the longest prefix is
chosen if it has enough free pages for the rest. Otherwise the one with the most free pages, less those of
queued attempts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.caches.worker_load import WorkerLoad
from service.errors import NoWorker

if TYPE_CHECKING:
    from service.caches.entries import CacheEntry

# The granularity of prefixes. Coarser than most pages would lose hits; finer would find no more.
_AFFINITY_TOKENS = 16
_AFFINITY_BYTES = _AFFINITY_TOKENS * array("I").itemsize


@dataclass(slots=True, eq=False)
class WorkerView:
    """A ready worker."""

    worker_id: str
    epoch: int
    page_tokens: int
    pages_total: int
    # The longest sequence: limited by the context of the model, or by all pages.
    capacity_tokens: int
    # Free or cached pages, as last reported.
    pages_available: int
    # Pages of running attempts, which may not be counted in that yet.
    pages_queued: int = 0
    # The caches whose KV it has, in LRU order; written by `KvPlacement`.
    held: OrderedDict[CacheEntry, None] = field(default_factory=OrderedDict)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # It is silent: it gets no new sequences while there is another worker.
    suspect: bool = False
    # It will be replaced: it gets no new attempts.
    draining: bool = False
    # The weights that it has loaded.
    weights: int = 0
    # Whether this incarnation can take sequences; written by `Workers`.
    is_ready: bool = False

    @property
    def headroom(self) -> int:
        """Pages that are free for a new sequence."""
        return self.pages_available - self.pages_queued

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


class PrefixAffinity:
    """Remembers which worker last computed each prefix. Bounded; only a hint."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def record(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Notes that `worker` computes a sequence with these tokens."""
        for digest in _prefix_digests(token_ids, salt):
            self._holders[digest] = (worker.worker_id, worker.epoch)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Undoes `record`."""
        for digest in _prefix_digests(token_ids, salt):
            if self._holders.get(digest) == (worker.worker_id, worker.epoch):
                del self._holders[digest]

    def longest(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[tuple[str, int], int] | None:
        """The (worker id, epoch) that computed the longest known prefix, and its length in tokens."""
        best: tuple[tuple[str, int], int] | None = None
        for count, digest in enumerate(_prefix_digests(token_ids, salt), start=1):
            holder = self._holders.get(digest)
            if holder is None:
                break
            best = (holder, count * _AFFINITY_TOKENS)
        return best


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
        """Removes a worker."""
        del self._workers[worker.worker_id]
        worker.is_ready = False

    def open_workers(self, weights: int) -> list[WorkerView]:
        """The workers that take new sequences of these weights."""
        return [worker for worker in self if worker.weights == weights and not worker.draining]

    def choose(self, token_ids: Sequence[int], salt: bytes = b"", weights: int = 0) -> WorkerView:
        """The worker for a sequence that starts with `token_ids`. Raises NoWorker if there is none.

        Only sequences of the same salt share prefixes. A full worker refuses the attempt and reports
        how many pages are missing.
        """
        there = self.open_workers(weights)
        if not there:
            raise NoWorker
        heard = [w for w in there if not w.suspect] or there
        worker = self._holder_with_room(token_ids, salt)
        if worker is None or worker not in heard:
            # Workers whose capacity is too small come last.
            fitting = [w for w in heard if w.capacity_tokens >= len(token_ids)] or heard
            worker = max(fitting, key=lambda w: (w.headroom, -len(w.held)))
        return worker

    def _holder_with_room(self, token_ids: Sequence[int], salt: bytes) -> WorkerView | None:
        known = self.affinity.longest(token_ids, salt)
        if known is None:
            return None
        holder, held_tokens = known
        worker = self.find(*holder)
        if worker is None or len(token_ids) > worker.capacity_tokens:
            return None
        held_pages = held_tokens // worker.page_tokens
        return worker if worker.headroom >= worker.pages_for(len(token_ids)) - held_pages else None
