"""Start-time fair queueing in one service class of the scheduler."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from workers.decodes import DECODE_COST
from workers.operations import Forward, Priority

_FEW_FLOWS = 64
_by_start = attrgetter("virtual_start")
_by_order = attrgetter("virtual_start", "arrival")


@dataclass(slots=True)
class Flow:
    """One caller in a service class: its number of forwards, their cost, and its next virtual start."""

    next_start: int
    forwards: int = 0
    cost: int = 0


class ServiceClass:
    """Forwards of one class in order of (virtual start, arrival), and the virtual time.

    A forward's virtual start is the virtual end of its caller's previous forward, or the virtual time if that
    is later. The virtual time follows the largest virtual start that was dispatched. So a caller's only
    forward goes before the second of another caller's thousand, and a caller that is alone is served in order
    of arrival.

    No forward starves: virtual starts do not change, and virtual time passes them. If a dispatch does not
    advance virtual time, it still advances by 1/n of the dispatched cost, for n callers. Otherwise callers
    that are always new would always go first. A caller without forwards is remembered until virtual time has
    passed its next start: so an expensive forward also delays one that the caller queues after its end.

    A priority moves a forward up or down by a head start: as if that much less or more work had been done
    when it arrived. It changes the forward's place, not the cost charged to its caller. The priorities of
    others make a forward wait for at most two head starts of work.
    """

    def __init__(self, head_start: int = 0) -> None:
        """`head_start`: in units of cost."""
        self._head_start = head_start
        # A sorted list: a memmove of thousands of pointers for each change is cheaper than a tree.
        self.queue: list[Forward] = []
        self.virtual_time = 0
        self.flows: dict[int, Flow] = {}
        self.cost = 0
        # Since virtual time last changed: the dispatched cost, and the maximum number of callers.
        self._dispatched = 0
        self._max_callers = 0
        self._num_callers = 0
        # The total cost dispatched; and the forwards of low priority, each with that total at its arrival.
        self._total = 0
        self._low_priority: deque[tuple[int, Forward]] = deque()
        # With more flows than this, obsolete ones are removed.
        self._sweep_at = _FEW_FLOWS

    @property
    def active_callers(self) -> set[int]:
        """The callers that have a forward here. O(callers)."""
        return {caller for caller, flow in self.flows.items() if flow.forwards}

    def wanted(self) -> dict[int, int]:
        """By caller, the cost of its forwards here. O(callers)."""
        if not self.cost:
            return {}
        return {caller: flow.cost for caller, flow in self.flows.items() if flow.forwards}

    def add(self, forward: Forward) -> None:
        """Count a forward and set its virtual start, behind the others of its caller. See `enqueue`."""
        flow = self._add_to_flow(forward)
        start = max(flow.next_start, self.virtual_time)
        flow.next_start = start + forward.cost
        forward.virtual_start = start
        if forward.priority is not Priority.NORMAL:
            # Virtual time advances by 1/n of the work, for n callers.
            forward.virtual_start -= forward.priority.value * self._head_start // self._num_callers
        if forward.priority is Priority.LOW:
            self._low_priority.append((self._total, forward))

    def transfer_in(self, forward: Forward) -> None:
        """Count and enqueue a forward that has begun in the other class.

        It was dispatched there, so here it goes before its caller's waiting forwards. It counts as dispatched
        here, too. Otherwise a steady flow from the other class would stop virtual time.
        """
        self._add_to_flow(forward)
        forward.virtual_start = self.virtual_time
        self.dispatch(forward)
        self.enqueue(forward)

    def remove(self, forward: Forward) -> None:
        """Dequeue a forward and stop counting it."""
        self._dequeue(forward)
        flow = self.flows[forward.caller]
        flow.forwards -= 1
        flow.cost -= forward.cost
        self.cost -= forward.cost
        self._num_callers -= flow.forwards == 0
        self._sweep()

    def _sweep(self) -> None:
        if len(self.flows) > self._sweep_at:
            self.flows = {
                caller: flow
                for caller, flow in self.flows.items()
                if flow.forwards or flow.next_start > self.virtual_time
            }
            self._sweep_at = 2 * len(self.flows) + _FEW_FLOWS

    def dispatch(self, forward: Forward) -> None:
        """Note that a forward is scheduled for the first time. Advances virtual time."""
        self._dispatch(forward.virtual_start, forward.cost)

    def dispatch_all(self, costs: Mapping[int, int]) -> None:
        """Note that decodes were scheduled without being queued. `costs`: their cost by caller."""
        last = self.virtual_time
        for caller, cost in costs.items():
            flow = self.flows.get(caller)
            if flow is None:
                flow = self.flows[caller] = Flow(self.virtual_time)
            end = max(flow.next_start, self.virtual_time) + cost
            flow.next_start, last = end, max(last, end - DECODE_COST)
        self._max_callers = max(self._max_callers, self._num_callers + len(costs))
        self._dispatch(last, sum(costs.values()))
        self._sweep()

    def _dispatch(self, virtual_time: int, cost: int) -> None:
        """Note that forwards of this total cost were dispatched, which all start by `virtual_time`."""
        self._dispatched += cost
        self._total += cost
        if self._low_priority:
            self._promote_overdue()
        if virtual_time <= self.virtual_time:
            virtual_time = self.virtual_time + self._dispatched // (self._max_callers + 1)
            # Not past the next waiting forward: its place would then be that of a new one.
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
        flow = self.flows.get(forward.caller)
        if flow is None:
            flow = self.flows[forward.caller] = Flow(self.virtual_time)
        if not flow.forwards:
            self._num_callers += 1
            self._max_callers = max(self._max_callers, self._num_callers)
        flow.forwards += 1
        flow.cost += forward.cost
        self.cost += forward.cost
        return flow
