"""Forwards waiting for their turn: one queue per sequence, whose first stands in one of two lanes.

    sequence 7   [ op 3 | op 9 ]         short  [ op 3, op 4 ]   at most SHORT_TOKENS to go
    sequence 8   [ op 4 ]                long   [ op 5 ]         the others
    sequence 9   [ op 5 | op 6 ]

Queues are in order of arrival; in a lane callers take turns by what their forwards cost, by start-time fair
queueing (Goyal, Vin and Cheng, 1996). This module does not decide what runs; `scheduler` does.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from workers.operations import Forward, Priority
from workers.running import Behind, RunningForward

# A forward with no more tokens than this to go is short.
SHORT_TOKENS = 16

_FEW_CALLERS = 64

# Where a forward begins to stand, in head starts: see `Lane`.
_HEAD_STARTS = {Priority.LOW: -1, Priority.NORMAL: 0, Priority.HIGH: 1}


@dataclass(slots=True, eq=False)
class QueuedForward:
    """A forward held. The scheduler has its notes here, and `running` is the engine's."""

    arrival: int
    op: Forward
    # Below 0: of a caller of its own.
    caller: int
    # Where it stands, or will once the earlier forwards of its sequence are done; at (tag, arrival).
    lane: Lane
    # What it costs in its lane: see `cost_of`.
    cost: int
    tag: int
    row_weight: int
    in_line: bool = False
    # What it has become; None before it has begun.
    running: RunningForward | None = None
    # While it waits for what another one computes: the scheduler's note.
    behind: Behind | None = None
    # The last step it was put in: the scheduler's note.
    step: int = -1

    @property
    def begun(self) -> bool:
        """Whether it has had its first turn."""
        return self.running is not None

    @property
    def remaining(self) -> int:
        """Tokens to go."""
        return len(self.op.token_ids) - (0 if self.running is None else self.running.computed)


def cost_of(op: Forward, tokens: int) -> int:
    """What the last `tokens` of a forward cost a step: its tokens, and its rows by their weight."""
    return tokens + min(op.wanted_rows, tokens) * op.row_weight


by_arrival = attrgetter("arrival")
by_tag = attrgetter("tag")
by_place = attrgetter("tag", "arrival")


@dataclass(slots=True)
class Backlog:
    """What a caller has in a lane, in line or behind another forward of its sequence; and what that costs."""

    next_tag: int
    held: int = 0
    cost: int = 0


class Lane:
    """One class of forwards in order of (tag, arrival), and the virtual time from which tags are given.

    The tag of a caller's forward is that of its last one and what that one costs, or the virtual time if that
    is later; virtual time follows the largest tag that had its turn. So who has one forward stands before the
    second of another's thousand, who asks for little stands before who asks for much, and a caller who is
    alone is served in order of arrival.

    Nothing starves. A tag that was given stays, and who comes once virtual time has passed it stands behind.
    It does pass: while it stands still, what has its turn moves it on by a share of its cost, one n-th for n
    callers. Without that, callers who are always new would always go first.

    Who has nothing here any more stays known until virtual time has passed what it was given: else who asks
    for much would pay for it only if he asks for the next before the first is done.

    A head start, or its contrary, is what a priority gives: as if the forward had come before so much work
    was done, or after it. It changes the forward's place, and nothing that its caller is charged. Nobody
    waits for more than two of them because of others' priorities, however many these are.
    """

    def __init__(self, head_start: int = 0) -> None:
        """`head_start`: how much work one is worth, in units of cost."""
        self._head_start = head_start
        # A sorted list: a memmove of thousands of pointers, once for each forward that enters or leaves, is
        # cheaper than any tree.
        self.line: list[QueuedForward] = []
        self.virtual_time = 0
        self.callers: dict[int, Backlog] = {}
        self.cost = 0
        # Since virtual time last moved: the cost of turns, and the most callers there were at once.
        self._turns = 0
        self._most_callers = 0
        self._callers_here = 0
        # The cost of all turns; and of which low priority came, when so much was done.
        self._done = 0
        self._held_back: deque[tuple[int, QueuedForward]] = deque()
        # With more callers than this, those who need not be known any more are forgotten.
        self._sweep_at = _FEW_CALLERS

    @property
    def present(self) -> set[int]:
        """The callers who have a forward here. O(callers)."""
        return {caller for caller, backlog in self.callers.items() if backlog.held}

    def join(self, caller: int, cost: int, head_starts: int = 0) -> int:
        """Count one more forward of `caller` and return its tag: behind its others."""
        backlog = self._count(caller, cost)
        tag = max(backlog.next_tag, self.virtual_time)
        backlog.next_tag = tag + cost
        # Virtual time goes on by a share of the work: one n-th for n callers.
        return tag - head_starts * self._head_start // self._callers_here

    def take_over(self, caller: int, cost: int) -> int:
        """Count a forward that has begun in the other lane and return its tag.

        It had its turn there, so it stands before what its caller has waiting here. It counts as a turn here
        too: forwards that always take over cannot hold virtual time.
        """
        self._count(caller, cost)
        tag = self.virtual_time
        self.turn(tag, cost)
        return tag

    def quit(self, caller: int, cost: int) -> None:
        """Count one forward of `caller` less."""
        backlog = self.callers[caller]
        backlog.held -= 1
        backlog.cost -= cost
        self.cost -= cost
        self._callers_here -= backlog.held == 0
        if len(self.callers) > self._sweep_at:
            self.callers = {
                caller: backlog
                for caller, backlog in self.callers.items()
                if backlog.held or backlog.next_tag > self.virtual_time
            }
            self._sweep_at = 2 * len(self.callers) + _FEW_CALLERS

    def turn(self, tag: int, cost: int) -> None:
        """Note that a forward with this tag and cost has its turn. Moves virtual time, and nobody's place."""
        self._turns += cost
        self._done += cost
        if self._held_back:
            self._call_up()
        share = self._turns // (self._most_callers + 1)
        if tag > self.virtual_time:
            self._move_to(tag)
        elif share:
            # Not past anyone who waits: they would all stand as if they had just come.
            ahead = bisect_right(self.line, self.virtual_time, key=by_tag)
            virtual_time = self.virtual_time + share
            if ahead < len(self.line):
                virtual_time = min(virtual_time, self.line[ahead].tag)
            self._move_to(virtual_time)

    def hold_back(self, entry: QueuedForward) -> None:
        """Watch a forward of low priority: it is called up when enough was done since it came."""
        self._held_back.append((self._done, entry))

    def _call_up(self) -> None:
        """Those who were held back for two head starts of work stand first, if they wait still."""
        while self._held_back and self._done - self._held_back[0][0] > 2 * self._head_start:
            _, entry = self._held_back.popleft()
            if entry.begun or entry.lane is not self:
                continue
            in_line = entry.in_line
            self.step_out(entry)
            first = self.line[0].tag if self.line else self.virtual_time
            entry.tag = min(entry.tag, first, self.virtual_time)
            if in_line:
                self.line_up(entry)

    def line_up(self, entry: QueuedForward) -> None:
        """Put `entry` into its place."""
        insort(self.line, entry, key=by_place)
        entry.in_line = True

    def step_out(self, entry: QueuedForward) -> None:
        """Take `entry` out of line, if it is in it."""
        if entry.in_line:
            del self.line[bisect_left(self.line, by_place(entry), key=by_place)]
            entry.in_line = False

    def _count(self, caller: int, cost: int) -> Backlog:
        backlog = self.callers.setdefault(caller, Backlog(self.virtual_time))
        self._callers_here += backlog.held == 0
        self._most_callers = max(self._most_callers, self._callers_here)
        backlog.held += 1
        backlog.cost += cost
        self.cost += cost
        return backlog

    def _move_to(self, virtual_time: int) -> None:
        self.virtual_time = virtual_time
        self._turns = 0
        self._most_callers = self._callers_here

    def check_invariants(self, held: list[QueuedForward]) -> None:
        """Assert that line, tags and callers agree. `held`: the lane's entries in order of arrival."""
        assert self.line == sorted((entry for entry in held if entry.in_line), key=by_place)
        assert all(entry.tag <= self.virtual_time for entry in held if entry.begun)
        by_caller: dict[int, list[QueuedForward]] = {}
        for entry in held:
            by_caller.setdefault(entry.caller, []).append(entry)
        assert {
            caller: (len(entries), sum(entry.cost for entry in entries))
            for caller, entries in by_caller.items()
        } == {
            caller: (backlog.held, backlog.cost) for caller, backlog in self.callers.items() if backlog.held
        }
        assert self.cost == sum(entry.cost for entry in held)
        assert self._callers_here == len(by_caller)
        for caller, entries in by_caller.items():
            plain = [e.tag for e in entries if not e.begun and e.op.priority is Priority.NORMAL]
            assert all(earlier < later for earlier, later in pairwise(plain))
            assert all(tag < self.callers[caller].next_tag for tag in plain)


class ForwardQueue:
    """Owns the entries from `add` until `leave` or `expire`. Only the scheduler calls it."""

    def __init__(self, short_head_start: int = 0, long_head_start: int = 0) -> None:
        """What a head start is worth in each lane."""
        self.short = Lane(short_head_start)
        self.long = Lane(long_head_start)
        self.begun = 0
        self._entries: dict[int, QueuedForward] = {}
        self._by_sequence: dict[int, OrderedDict[int, QueuedForward]] = {}
        # (deadline_ns, arrival, op_id), a heap. Those of forwards that left are dropped lazily.
        self._deadlines: list[tuple[int, int, int]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, op_id: int) -> QueuedForward | None:
        """Return the entry of `op_id`, if it is held."""
        return self._entries.get(op_id)

    def entries(self) -> list[QueuedForward]:
        """Return all that are held, in order of arrival."""
        return list(self._entries.values())

    def add(self, op: Forward, row_weight: int) -> None:
        """Queue `op` behind the others of its sequence. Its op_id must be new, and tokens remain.

        `row_weight`: what each of its rows takes of a step.
        """
        caller = op.caller or -1 - self._arrivals
        lane, cost = self._lane_of(len(op.token_ids)), cost_of(op, len(op.token_ids))
        tag = lane.join(caller, cost, _HEAD_STARTS[op.priority])
        entry = QueuedForward(self._arrivals, op, caller, lane, cost, tag, row_weight)
        self._arrivals += 1
        self._entries[op.op_id] = entry
        if op.priority is Priority.LOW:
            lane.hold_back(entry)
        queue = self._by_sequence.setdefault(op.sequence, OrderedDict())
        queue[op.op_id] = entry
        if len(queue) == 1:
            lane.line_up(entry)
        if op.deadline_ns is not None:
            heapq.heappush(self._deadlines, (op.deadline_ns, entry.arrival, op.op_id))
            if len(self._deadlines) > 2 * len(self._entries) + 64:
                self._deadlines = list(filter(self._is_watched, self._deadlines))
                heapq.heapify(self._deadlines)

    def mark_begun(self, entry: QueuedForward, running: RunningForward) -> None:
        """Note what `entry` has become; its deadline no longer matters."""
        entry.running = running
        self.begun += 1
        if running.computed:
            self.reclassify(entry)  # Reuse may have made it short.

    def reclassify(self, entry: QueuedForward) -> None:
        """Move a forward in line to the lane of its class, if what it has computed made that another one."""
        lane = self._lane_of(entry.remaining)
        if entry.lane is not lane:
            entry.lane.step_out(entry)
            entry.lane.quit(entry.caller, entry.cost)
            entry.lane, entry.cost = lane, cost_of(entry.op, entry.remaining)
            entry.tag = lane.take_over(entry.caller, entry.cost)
            lane.line_up(entry)

    def leave(self, entry: QueuedForward) -> None:
        """Drop `entry`; the next of its sequence takes its own place in line."""
        op = entry.op
        entry.lane.step_out(entry)
        entry.lane.quit(entry.caller, entry.cost)
        self.begun -= entry.running is not None
        del self._entries[op.op_id]
        queue = self._by_sequence[op.sequence]
        del queue[op.op_id]
        if queue:
            first = next(iter(queue.values()))
            if not first.in_line:
                first.lane.line_up(first)
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

    def _lane_of(self, remaining: int) -> Lane:
        return self.short if remaining <= SHORT_TOKENS else self.long

    def _is_watched(self, deadline: tuple[int, int, int]) -> bool:
        _, arrival, op_id = deadline
        entry = self._entries.get(op_id)
        return entry is not None and entry.arrival == arrival and not entry.begun

    def check_invariants(self) -> None:
        """Assert that lanes, queues, counts and deadlines agree. For tests; O(held)."""
        queues = [list(queue.values()) for queue in self._by_sequence.values()]
        held = sorted(self._entries.values(), key=by_arrival)
        assert sorted((entry for queue in queues for entry in queue), key=by_arrival) == held
        assert all(queue == sorted(queue, key=by_arrival) for queue in queues)
        assert all(entry.in_line == (entry is queue[0]) for queue in queues for entry in queue)
        assert all(entry.lane is self._lane_of(entry.remaining) for entry in held)
        for lane in (self.short, self.long):
            lane.check_invariants([entry for entry in held if entry.lane is lane])
        assert not any(entry.begun for queue in queues for entry in queue[1:])
        assert self.begun == sum(entry.begun for entry in held)
        watched = {op_id for _, arrival, op_id in filter(self._is_watched, self._deadlines)}
        assert watched == {e.op.op_id for e in held if e.op.deadline_ns is not None and not e.begun}
