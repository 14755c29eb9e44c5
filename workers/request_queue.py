"""Forwards that wait to be scheduled, in fair order.

    sequence 7   [ op 3 | op 9 ]         short  [ op 3, op 4 ]   at most SHORT_TOKENS to go
    sequence 8   [ op 4 ]                long   [ op 5 ]         more tokens to go
    sequence 9   [ op 5 | op 6 ]

Each sequence has a queue in order of arrival. Its first forward is also in the queue of its service class.
There callers take turns by the cost of their forwards: start-time fair queueing (Goyal, Vin and Cheng, 1996;
ADRs 8 and 10). The `scheduler` decides what runs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from operator import attrgetter

from workers.operations import Forward, Priority

# A forward with at most so many tokens to go is short.
SHORT_TOKENS = 16

_FEW_FLOWS = 64
_by_start = attrgetter("virtual_start")
_by_order = attrgetter("virtual_start", "arrival")


def cost_of(forward: Forward, tokens: int) -> int:
    """The cost of the last `tokens` of a forward: its tokens, and its rows by their weight."""
    return tokens + min(forward.wanted_rows, tokens) * forward.row_weight


@dataclass(slots=True)
class Flow:
    """One caller in a service class: its number of forwards, their cost, and its next virtual start."""

    next_start: int
    forwards: int = 0
    cost: int = 0


class ServiceClass:
    """Forwards of one class in order of (virtual start, arrival), and the virtual time.

    A forward's virtual start is where its caller's last one ends, or the virtual time if that is later. The
    virtual time follows the largest virtual start that was dispatched. So a caller's only forward goes before
    the second of another caller's thousand, and a caller that is alone is served in order of arrival.

    No forward starves: virtual starts do not change, and virtual time passes them. If a dispatch does not
    move virtual time, it still advances by one n-th of the dispatched cost, for n callers. Otherwise callers
    that are always new would always go first. A caller without forwards is remembered until virtual time has
    passed its next start: an expensive forward also delays a next one that is queued after its end.

    A priority moves a forward forward or back by a head start: as if it had arrived before so much work was
    done, or after it. It changes the forward's place, not the cost charged to its caller. Because of the
    priorities of others, no forward waits for more than two head starts of work.
    """

    def __init__(self, head_start: int = 0) -> None:
        """`head_start`: in units of cost."""
        self._head_start = head_start
        # A sorted list: a memmove of thousands of pointers for each change is cheaper than a tree.
        self.queue: list[Forward] = []
        self.virtual_time = 0
        self.flows: dict[int, Flow] = {}
        self.cost = 0
        # Since virtual time last changed: the dispatched cost, and the most callers at once.
        self._dispatched = 0
        self._max_callers = 0
        self._num_callers = 0
        # The cost dispatched so far; and the forwards of low priority, each with that cost at its arrival.
        self._total = 0
        self._low_priority: deque[tuple[int, Forward]] = deque()
        # With more flows than this, obsolete ones are removed.
        self._sweep_at = _FEW_FLOWS

    @property
    def active_callers(self) -> set[int]:
        """The callers that have a forward here. O(callers)."""
        return {caller for caller, flow in self.flows.items() if flow.forwards}

    def add(self, forward: Forward) -> None:
        """Count a forward and set its virtual start, behind the others of its caller. See `enqueue`."""
        flow = self._add_to_flow(forward)
        start = max(flow.next_start, self.virtual_time)
        flow.next_start = start + forward.cost
        forward.virtual_start = start
        if forward.priority is not Priority.NORMAL:
            # Virtual time advances by one n-th of the work, for n callers.
            sign = 1 if forward.priority is Priority.HIGH else -1
            forward.virtual_start -= sign * self._head_start // self._num_callers
        if forward.priority is Priority.LOW:
            self._low_priority.append((self._total, forward))

    def transfer_in(self, forward: Forward) -> None:
        """Count and enqueue a forward that has begun in the other class.

        It was dispatched there, so it goes before its caller's waiting forwards here. It counts as dispatched
        here too, or a steady flow from the other class would stop virtual time.
        """
        self._add_to_flow(forward)
        forward.virtual_start = self.virtual_time
        self.dispatch(forward)
        self.enqueue(forward)

    def remove(self, forward: Forward) -> None:
        """Dequeue a forward and stop counting it."""
        self._dequeue(forward)
        flow = self.flows[forward.flow]
        flow.forwards -= 1
        flow.cost -= forward.cost
        self.cost -= forward.cost
        self._num_callers -= flow.forwards == 0
        if len(self.flows) > self._sweep_at:
            self.flows = {
                caller: flow
                for caller, flow in self.flows.items()
                if flow.forwards or flow.next_start > self.virtual_time
            }
            self._sweep_at = 2 * len(self.flows) + _FEW_FLOWS

    def dispatch(self, forward: Forward) -> None:
        """Note that a forward is scheduled for the first time. Advances virtual time."""
        virtual_time = forward.virtual_start
        self._dispatched += forward.cost
        self._total += forward.cost
        if self._low_priority:
            self._promote_overdue()
        if virtual_time <= self.virtual_time:
            virtual_time = self.virtual_time + self._dispatched // (self._max_callers + 1)
            # Not past the next waiting forward: the forwards passed would be ordered as if they were new.
            ahead = bisect_right(self.queue, self.virtual_time, key=_by_start)
            if ahead < len(self.queue):
                virtual_time = min(virtual_time, self.queue[ahead].virtual_start)
        if virtual_time > self.virtual_time:
            self.virtual_time = virtual_time
            self._dispatched = 0
            self._max_callers = self._num_callers

    def enqueue(self, forward: Forward) -> None:
        """Insert a forward at its place in the queue."""
        insort(self.queue, forward, key=_by_order)
        forward.is_enqueued = True

    def _dequeue(self, forward: Forward) -> None:
        if forward.is_enqueued:
            del self.queue[bisect_left(self.queue, _by_order(forward), key=_by_order)]
            forward.is_enqueued = False

    def _promote_overdue(self) -> None:
        """Move low-priority forwards to the front that have waited for two head starts of work."""
        while self._low_priority:
            total, forward = self._low_priority[0]
            if not forward.has_begun and self._total - total <= 2 * self._head_start:
                break
            self._low_priority.popleft()
            if forward.has_begun:
                continue
            was_enqueued = forward.is_enqueued
            self._dequeue(forward)
            first = self.queue[0].virtual_start if self.queue else self.virtual_time
            forward.virtual_start = min(forward.virtual_start, first, self.virtual_time)
            if was_enqueued:
                self.enqueue(forward)

    def _add_to_flow(self, forward: Forward) -> Flow:
        flow = self.flows.get(forward.flow)
        if flow is None:
            flow = self.flows[forward.flow] = Flow(self.virtual_time)
        if not flow.forwards:
            self._num_callers += 1
            self._max_callers = max(self._max_callers, self._num_callers)
        flow.forwards += 1
        flow.cost += forward.cost
        self.cost += forward.cost
        return flow


class RequestQueue:
    """Owns forwards from `add` until `remove` or `expire`. Only the scheduler calls it."""

    def __init__(self, short_head_start: int = 0, long_head_start: int = 0) -> None:
        """The head start of each class, in units of cost."""
        self.short = ServiceClass(short_head_start)
        self.long = ServiceClass(long_head_start)
        # By op_id, in order of arrival.
        self.forwards: dict[int, Forward] = {}
        self._by_sequence: dict[int, OrderedDict[int, Forward]] = {}
        # A heap of (deadline_ns, arrival, op_id). Obsolete entries are removed lazily, so it must not refer
        # to the forwards themselves, whose answers may be large.
        self._deadlines: list[tuple[int, int, int]] = []
        self._arrivals = 0

    def class_of(self, forward: Forward) -> ServiceClass:
        """The class of a forward."""
        return self.long if forward.is_long else self.short

    def add(self, forward: Forward) -> None:
        """Queue a forward behind the others of its sequence. It has a new op_id, and tokens to compute."""
        tokens = len(forward.token_ids)
        forward.arrival = self._arrivals
        self._arrivals += 1
        forward.flow = forward.caller or -1 - forward.arrival
        forward.is_long = tokens > SHORT_TOKENS
        forward.cost = cost_of(forward, tokens)
        service_class = self.long if forward.is_long else self.short
        service_class.add(forward)
        self.forwards[forward.op_id] = forward
        queue = self._by_sequence.setdefault(forward.sequence, OrderedDict())
        queue[forward.op_id] = forward
        if len(queue) == 1:
            service_class.enqueue(forward)
        if forward.deadline_ns is not None:
            heapq.heappush(self._deadlines, (forward.deadline_ns, forward.arrival, forward.op_id))
            if len(self._deadlines) > 2 * len(self.forwards) + 64:
                self._deadlines = [entry for entry in self._deadlines if self._if_expirable(entry)]
                heapq.heapify(self._deadlines)

    def reclassify(self, forward: Forward) -> None:
        """Move a forward to the other class if its remaining tokens belong there."""
        remaining = forward.remaining
        if forward.is_long != (remaining > SHORT_TOKENS):
            self.class_of(forward).remove(forward)
            forward.is_long = not forward.is_long
            forward.cost = cost_of(forward, remaining)
            self.class_of(forward).transfer_in(forward)

    def remove(self, forward: Forward) -> None:
        """Drop a forward, and enqueue the next one of its sequence."""
        service_class = self.long if forward.is_long else self.short
        service_class.remove(forward)
        del self.forwards[forward.op_id]
        queue = self._by_sequence[forward.sequence]
        del queue[forward.op_id]
        if not queue:
            del self._by_sequence[forward.sequence]
            return
        first = next(iter(queue.values()))
        if not first.is_enqueued:
            self.class_of(first).enqueue(first)

    def expire(self, now_ns: int) -> list[Forward]:
        """Drop and return the forwards that have not begun by their deadline, earliest deadline first."""
        expired = []
        while self._deadlines and self._deadlines[0][0] < now_ns:
            forward = self._if_expirable(heapq.heappop(self._deadlines))
            if forward is not None:
                self.remove(forward)
                expired.append(forward)
        return expired

    def _if_expirable(self, deadline: tuple[int, int, int]) -> Forward | None:
        """The forward of a deadline, if it still waits to begin."""
        _, arrival, op_id = deadline
        forward = self.forwards.get(op_id)
        return (
            forward if forward is not None and forward.arrival == arrival and not forward.has_begun else None
        )
