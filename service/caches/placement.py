"""The workers that are ready, and which of them takes a new sequence. Pure: no clock, no I/O.

Weights are kept apart: a sequence goes to workers that have its own.

The worker that already computed the longest prefix of the prompt takes it, as long as it has room for the
rest; else the one with the most free KV, less what is queued on it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from service.caches.admission import WorkerLoad
from service.errors import NoWorker

# How finely prefixes are remembered. Coarser than most pages would lose hits, finer would find no more.
_AFFINITY_TOKENS = 16
_AFFINITY_BYTES = _AFFINITY_TOKENS * array("I").itemsize


@dataclass(slots=True, eq=False)
class WorkerView:
    """What is known of a ready worker."""

    worker_id: str
    epoch: int
    page_tokens: int
    pages_total: int
    # The most tokens that one sequence can have there: its context's, or all its pages'.
    capacity_tokens: int
    # Pages free or cached when the worker last said so.
    pages_available: int
    # Pages of operations that were sent since and may not be counted in it yet.
    pages_queued: int = 0
    sequences: int = 0
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # It is silent: nothing new goes there as long as there is another.
    suspect: bool = False
    # It is about to be replaced: nothing begins there any more.
    draining: bool = False
    # Which weights it has loaded.
    weights: int = 0

    @property
    def headroom(self) -> int:
        """Pages a new sequence could take."""
        return self.pages_available - self.pages_queued

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


class PrefixAffinity:
    """Remembers which worker last computed each prompt prefix. Bounded; a hint, no promise."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def record(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Notes that `worker` computes these tokens as the start of a sequence."""
        for digest in _prefix_digests(token_ids, salt):
            self._holders[digest] = (worker.worker_id, worker.epoch)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """Takes back what `record` noted of these tokens and this worker."""
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


class Placement:
    """Owner of the views of ready workers: one for each worker, of its present incarnation."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerView] = {}
        self._affinity = PrefixAffinity()

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def add(self, worker: WorkerView) -> None:
        """A worker can take sequences. Raises ValueError if its last incarnation was not removed."""
        if worker.worker_id in self._workers:
            raise ValueError(f"worker {worker.worker_id} is ready already")
        self._workers[worker.worker_id] = worker

    def find(self, worker_id: str, epoch: int) -> WorkerView | None:
        """One incarnation of a worker, if it is ready."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def remove(self, worker: WorkerView) -> None:
        """The worker is gone."""
        del self._workers[worker.worker_id]

    def has(self, worker: WorkerView) -> bool:
        """Whether this incarnation is ready."""
        return self._workers.get(worker.worker_id) is worker

    def open_workers(self, weights: int) -> list[WorkerView]:
        """Those that take sequences of these weights."""
        return [worker for worker in self if worker.weights == weights and not worker.draining]

    def choose(self, token_ids: Sequence[int], salt: bytes = b"", weights: int = 0) -> WorkerView:
        """The worker for a sequence that starts with `token_ids`. Raises NoWorker if there is none.

        Only sequences of the same salt share their beginnings. It may be full: then the worker refuses, which
        says exactly how many pages are missing.
        """
        there = self.open_workers(weights)
        if not there:
            raise NoWorker
        heard = [w for w in there if not w.suspect] or there
        worker = self._holder_with_room(token_ids, salt)
        if worker is None or worker not in heard:
            # One that could never take it is no choice as long as there is another.
            fitting = [w for w in heard if w.capacity_tokens >= len(token_ids)] or heard
            worker = max(fitting, key=lambda w: (w.headroom, -w.sequences))
        return worker

    def computes(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """A worker that was chosen is asked for the sequence: others that begin alike had better go there."""
        self._affinity.record(token_ids, worker, salt)

    def not_computed(self, token_ids: Sequence[int], worker: WorkerView, salt: bytes = b"") -> None:
        """What was placed there was refused."""
        self._affinity.forget(token_ids, worker, salt)

    def _holder_with_room(self, token_ids: Sequence[int], salt: bytes) -> WorkerView | None:
        known = self._affinity.longest(token_ids, salt)
        if known is None:
            return None
        holder, held_tokens = known
        worker = self.find(*holder)
        if worker is None or len(token_ids) > worker.capacity_tokens:
            return None
        held_pages = held_tokens // worker.page_tokens
        return worker if worker.headroom >= worker.pages_for(len(token_ids)) - held_pages else None
