"""Where the KV of each cache is, and who has to go where pages run out. Pure: no clock, no I/O.

KV is a copy of what the journal has: it may be dropped at any moment, and is computed again when it is next
needed. So caches are bounded by the journal, and a worker's pages only bound how many are quick to go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from service.caches.effects import Command, ReleaseSequences
from service.caches.entries import CacheEntry, Need, Operation, Phase
from service.caches.placement import WorkerView

# A cache that nobody has used for so long is idle: its caller is not merely between two steps.
_IDLE_S = 0.25
# Where more callers decode than there is room for, each cache keeps its pages for so long: its turn.
_TURN_S = 2.0


class Residence:
    """Owner of every cache's home."""

    def __init__(self, send: Callable[[WorkerView, Command], None], number: Callable[[], int]) -> None:
        self._send = send
        self._number = number
        # By worker, the one that was used longest ago first.
        self._held: dict[WorkerView, OrderedDict[CacheEntry, None]] = {}

    def held(self, worker: WorkerView) -> Iterator[CacheEntry]:
        """The caches that have a worker as their home, the one that was used longest ago first."""
        return iter(self._held.get(worker, ()))

    def settle(self, entry: CacheEntry, worker: WorkerView, now_s: float, kv_len: int = 0) -> None:
        """A cache without a home gets one, where `kv_len` of its tokens are."""
        assert entry.home is None
        entry.home, entry.kv_len, entry.placed_s = worker, kv_len, now_s
        entry.was_sent = kv_len > 0
        worker.sequences += 1
        self._held.setdefault(worker, OrderedDict())[entry] = None

    def unsettle(self, *entries: CacheEntry) -> None:
        """Drops the KV of caches, wherever it is: with one command for each worker."""
        sent: dict[WorkerView, list[int]] = {}
        for entry in entries:
            worker = entry.home
            if worker is not None:
                if entry.was_sent:
                    sent.setdefault(worker, []).append(entry.number)
                self._forget(entry, worker)
        for worker, numbers in sent.items():
            self._send(worker, ReleaseSequences(self._number(), numbers))

    def used(self, entry: CacheEntry) -> None:
        """It was used just now."""
        if entry.home is not None:
            self._held[entry.home].move_to_end(entry)

    def lose(self, worker: WorkerView) -> list[CacheEntry]:
        """A worker is gone, and all KV in it. Returns whose that was, the one used longest ago first."""
        lost = list(self.held(worker))
        for entry in lost:
            self._forget(entry, worker)
        self._held.pop(worker, None)
        return lost

    def make_room(self, worker: WorkerView, pages: int, wanted_by: Operation, now_s: float) -> bool:
        """Drops KV that is not in use, until about so many pages are free. False if there was none."""
        freed, going = 0, []
        for entry in self.held(worker):
            if freed >= pages:
                break
            if entry is not wanted_by.entry and _may_go(entry, wanted_by, now_s):
                # Pages that others share stay; who finds that too little comes again.
                freed += max(1, worker.pages_for(entry.kv_len))
                going.append(entry)
        self.unsettle(*going)
        return freed > 0

    def has_others(self, entry: CacheEntry) -> bool:
        """Whether anyone else has KV where it has."""
        return entry.home is not None and any(other is not entry for other in self.held(entry.home))

    def _forget(self, entry: CacheEntry, worker: WorkerView) -> None:
        del self._held[worker][entry]
        worker.sequences -= 1
        entry.home, entry.kv_len, entry.was_sent = None, 0, False

    def check(self, entries: dict[int, CacheEntry]) -> None:
        """Raises AssertionError if homes and lists disagree. `entries`: all there are, by number."""
        for worker, held in self._held.items():
            assert worker.sequences == len(held)
            assert all(entry.home is worker and entries.get(entry.number) is entry for entry in held)
        homes = sum(1 for entry in entries.values() if entry.home is not None)
        assert homes == sum(map(len, self._held.values()))


def _may_go(entry: CacheEntry, wanted_by: Operation, now_s: float) -> bool:
    """Whether its pages may be given to an operation."""
    running = entry.running
    # A fork that has its turn here and not on its other caches may wait for whoever wants these pages.
    if running is not None and running.phase is not Phase.WAITING:
        # Of those that wait for room the first gets what the others have: else they wait for one another.
        waits = running.phase is Phase.PARKED and running.need is Need.ROOM
        return waits and running.ticket > wanted_by.ticket
    return now_s - entry.used_s >= _IDLE_S or now_s - entry.placed_s >= _TURN_S
