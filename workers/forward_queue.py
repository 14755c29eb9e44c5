"""Forwards waiting for their turn: one queue per sequence, whose first stands in one of two lanes.

    sequence 7   [ op 3 | op 9 ]         short  [ op 3, op 4 ]   at most SHORT_TOKENS to go
    sequence 8   [ op 4 ]                long   [ op 5 ]         the others
    sequence 9   [ op 5 | op 6 ]

Lanes and queues are in order of arrival. This module does not decide what runs; `scheduler` does.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from workers.operations import Forward

# A forward with no more tokens than this to go is short.
SHORT_TOKENS = 16


@dataclass(slots=True, eq=False)
class Entry:
    """A forward held. Changed by `ForwardQueue` only, but for `step`."""

    arrival: int
    op: Forward
    begun: bool = False
    # Where it stands; None while an earlier forward of its sequence is not done.
    lane: list[Entry] | None = field(default=None, repr=False)
    # The last step it was put in: the scheduler's note.
    step: int = -1


by_arrival = attrgetter("arrival")


class ForwardQueue:
    """Owns the entries from `add` until `leave` or `expire`. Only the scheduler calls it.

    Lanes are sorted lists: a memmove of thousands of pointers, once for each forward that enters or
    leaves, is cheaper than any tree.
    """

    def __init__(self) -> None:
        self.short: list[Entry] = []
        self.long: list[Entry] = []
        self.begun = 0
        self._entries: dict[int, Entry] = {}
        self._by_sequence: dict[int, OrderedDict[int, Entry]] = {}
        # (deadline_ns, arrival, op_id), a heap. Those of forwards that left are dropped lazily.
        self._deadlines: list[tuple[int, int, int]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, op_id: int) -> Entry | None:
        """Return the entry of `op_id`, if it is held."""
        return self._entries.get(op_id)

    def add(self, op: Forward) -> None:
        """Queue `op` behind the others of its sequence. Its op_id must be new, and tokens remain."""
        entry = Entry(self._arrivals, op)
        self._arrivals += 1
        self._entries[op.op_id] = entry
        queue = self._by_sequence.setdefault(op.sequence, OrderedDict())
        queue[op.op_id] = entry
        if len(queue) == 1:
            self.classify(entry)
        if op.deadline_ns is not None:
            heapq.heappush(self._deadlines, (op.deadline_ns, entry.arrival, op.op_id))
            if len(self._deadlines) > 2 * len(self._entries) + 64:
                self._deadlines = list(filter(self._is_watched, self._deadlines))
                heapq.heapify(self._deadlines)

    def mark_begun(self, entry: Entry) -> None:
        """Note that `entry` has begun; its deadline no longer matters."""
        entry.begun = True
        self.begun += 1

    def classify(self, entry: Entry) -> None:
        """Put the first forward of a sequence into the lane of its class, out of the other one."""
        lane = self.short if entry.op.remaining <= SHORT_TOKENS else self.long
        if entry.lane is not lane:
            self._leave_lane(entry)
            insort(lane, entry, key=by_arrival)
            entry.lane = lane

    def leave(self, entry: Entry) -> None:
        """Drop `entry`; the next of its sequence takes its place, at its own arrival."""
        op = entry.op
        self._leave_lane(entry)
        self.begun -= entry.begun
        del self._entries[op.op_id]
        queue = self._by_sequence[op.sequence]
        del queue[op.op_id]
        if queue:
            self.classify(next(iter(queue.values())))
        else:
            del self._by_sequence[op.sequence]

    def expire(self, now_ns: int) -> list[Forward]:
        """Drop and return the forwards not begun by their deadline, earliest deadline first."""
        expired = []
        while self._deadlines and self._deadlines[0][0] < now_ns:
            deadline = heapq.heappop(self._deadlines)
            if self._is_watched(deadline):
                entry = self._entries[deadline[2]]
                self.leave(entry)
                expired.append(entry.op)
        return expired

    def _is_watched(self, deadline: tuple[int, int, int]) -> bool:
        _, arrival, op_id = deadline
        entry = self._entries.get(op_id)
        return entry is not None and entry.arrival == arrival and not entry.begun

    def _leave_lane(self, entry: Entry) -> None:
        if entry.lane is not None:
            del entry.lane[bisect_left(entry.lane, entry.arrival, key=by_arrival)]
            entry.lane = None

    def check_invariants(self) -> None:
        """Assert that lanes, queues, counts and deadlines agree. For tests; O(held)."""
        queues = [list(queue.values()) for queue in self._by_sequence.values()]
        held = sorted(self._entries.values(), key=by_arrival)
        assert sorted((entry for queue in queues for entry in queue), key=by_arrival) == held
        assert all(queue == sorted(queue, key=by_arrival) for queue in queues)
        first = sorted((queue[0] for queue in queues), key=by_arrival)
        assert sorted(self.short + self.long, key=by_arrival) == first
        for lane in (self.short, self.long):
            assert lane == sorted(lane, key=by_arrival)
            assert all(entry.lane is lane for entry in lane)
            assert all((entry.op.remaining <= SHORT_TOKENS) == (lane is self.short) for entry in lane)
        assert not any(entry.begun for queue in queues for entry in queue[1:])
        assert self.begun == sum(entry.begun for entry in held)
        watched = {op_id for _, arrival, op_id in filter(self._is_watched, self._deadlines)}
        assert watched == {e.op.op_id for e in held if e.op.deadline_ns is not None and not e.begun}
