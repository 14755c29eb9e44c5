"""The workers that are ready, and the choice of one for a sequence. Pure: no clock, no I/O.

A sequence goes to a worker that has loaded its weights and has enough free pages. Of these the one is chosen
that has the least to compute before it is done: what is queued there and comes first, and what it does not
have of the prefix. So a prefix is computed again elsewhere once that is less than to wait for its holder.
Workers are taken to be equally fast. Between equal ones free pages decide, less those of queued attempts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from service.caches.entries import WorkerView
from service.errors import NoWorker

# The granularity of prefixes. Coarser than most pages would lose hits; finer would find no more.
_AFFINITY_TOKENS = 16
_AFFINITY_BYTES = _AFFINITY_TOKENS * array("I").itemsize

# One incarnation of a worker: its id and its epoch.
Holder = tuple[str, int]


class PrefixAffinity:
    """Remembers which workers computed each prefix: the last few. Bounded; only a hint."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._most_holders = 3
        # By prefix, as (worker id, epoch), the last one first.
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

    def forget(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Undoes `record`."""
        name = (worker.worker_id, worker.epoch)
        for digest in _prefix_digests(token_ids, salt):
            holders = tuple(holder for holder in self._holders.get(digest, ()) if holder != name)
            if holders:
                self._holders[digest] = holders
            else:
                self._holders.pop(digest, None)

    def held(self, token_ids: Sequence[int], salt: bytes = b"") -> dict[Holder, int]:
        """How many of the first tokens each worker has computed, as far as is known."""
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
        """Removes a worker."""
        del self._workers[worker.worker_id]
        worker.is_ready = False

    def open_workers(self, weights: int) -> list[WorkerView]:
        """The workers that take new sequences of these weights."""
        return [worker for worker in self if worker.weights == weights and not worker.draining]

    def named(self, worker_id: str) -> WorkerView | None:
        """The current incarnation of a worker, if it is ready."""
        return self._workers.get(worker_id)

    def choose(self, token_ids: Sequence[int], salt: bytes = b"", weights: int = 0) -> WorkerView:
        """The worker for a sequence that starts with `token_ids`. Raises NoWorker if there is none.

        Only sequences of the same salt share prefixes. A full worker refuses the attempt and reports
        how many pages are missing.
        """
        there = self.open_workers(weights)
        if not there:
            raise NoWorker
        heard = [w for w in there if not w.suspect] or there
        # Workers whose capacity is too small come last.
        fitting = [w for w in heard if w.capacity_tokens >= len(token_ids)] or heard
        known = self.affinity.held(token_ids, salt)
        held = {w: known.get((w.worker_id, w.epoch), 0) for w in fitting}
        with_room = [
            w for w in fitting if w.headroom >= w.pages_for(len(token_ids)) - held[w] // w.page_tokens
        ]

        def cost(worker: WorkerView) -> tuple[int, int, int]:
            missing = max(len(token_ids) - held[worker], 1)
            return worker.load.total_for(missing), -worker.headroom, len(worker.held)

        return min(with_room or fitting, key=cost if with_room else lambda w: (-w.headroom, len(w.held)))
