"""Which worker takes a new sequence. Pure: no clock, no I/O.

The worker that already computed the longest prefix of the prompt takes it, as long as it has room for the
rest; else the one with the most free KV, less what is queued on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PAGE_TOKENS = 16


@dataclass(slots=True)
class WorkerView:
    """What placement needs to know of a ready worker."""

    worker_id: str
    epoch: int
    # Pages free or cached when the worker last said so.
    pages_available: int
    # Pages of operations that were sent since and may not be counted in it yet.
    pages_queued: int = 0
    sequences: int = 0
    # All its pages, which no sequence can exceed.
    pages_total: int = 1 << 31

    @property
    def headroom(self) -> int:
        """Pages a new sequence could take."""
        return self.pages_available - self.pages_queued


class PrefixAffinity:
    """Remembers which worker last computed each prompt prefix, in pages. Bounded; a hint, no promise."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def record(self, token_ids: Sequence[int], worker: WorkerView) -> None:
        """Notes that `worker` computes these tokens as the start of a sequence."""
        for digest in _prefix_digests(token_ids):
            self._holders[digest] = (worker.worker_id, worker.epoch)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, token_ids: Sequence[int], worker: WorkerView) -> None:
        """Takes back what `record` noted of these tokens and this worker."""
        for digest in _prefix_digests(token_ids):
            if self._holders.get(digest) == (worker.worker_id, worker.epoch):
                del self._holders[digest]

    def longest(self, token_ids: Sequence[int]) -> tuple[tuple[str, int], int] | None:
        """The (worker id, epoch) that computed the longest known prefix, and its length in pages."""
        best: tuple[tuple[str, int], int] | None = None
        for pages, digest in enumerate(_prefix_digests(token_ids), start=1):
            holder = self._holders.get(digest)
            if holder is None:
                break
            best = (holder, pages)
        return best


def _prefix_digests(token_ids: Sequence[int]) -> Iterable[int]:
    """One chained hash for each full page. Python's hash of ints is not secret, but a hint needs no more."""
    digest = 0
    for start in range(0, len(token_ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        digest = hash((digest, *token_ids[start : start + PAGE_TOKENS]))
        yield digest


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def choose_worker(
    workers: Sequence[WorkerView], token_ids: Sequence[int], affinity: PrefixAffinity
) -> WorkerView | None:
    """The worker for a new sequence that starts with `token_ids`; None if there is no worker.

    It may still be too small: then the worker refuses, which says exactly how many pages are missing.
    """
    if not workers:
        return None
    known = affinity.longest(token_ids)
    if known is not None:
        holder, pages_held = known
        for worker in workers:
            if (worker.worker_id, worker.epoch) == holder:
                if worker.headroom >= pages_for(len(token_ids)) - pages_held:
                    return worker
                break
    return max(workers, key=lambda worker: (worker.headroom, -worker.sequences))
