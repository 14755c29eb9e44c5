"""Whether what is asked can be done in time: what waits at a worker, and how long the like of it took lately.

Pure: no clock, no I/O. Forwards of a worker wait in two lanes, as they do in it: short ones, whose callers
wait for every token, and long ones. What stands ahead of a new one is counted in the worker's own units of
cost, tokens and rows, and as the worker lets callers take turns: who has hundreds queued stands before nobody
but himself. How long it takes is a straight line through what forwards took that had so much ahead. It bends
with the load within some fifty answers, and is never asked where nothing is ahead: so a wrong guess refuses
nobody for long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.caches.requests import Append, Priority

# No more tokens than this are short. As in the worker.
_SHORT_TOKENS = 16
# How much of what was learnt an older answer still counts for, at the next.
_MEMORY = 0.98
# Less than so many answers tell nothing.
_FEW_ANSWERS = 8
# Answers to waits that are all alike do not tell how much a longer one would take.
_LEAST_SPREAD = 1 / 256
# The part of its time that may be spent on what is expected. The rest is for what is not: less of it for
# those who matter most, who are therefore refused last.
TIME_SHARES = {Priority.LOW: 0.5, Priority.NORMAL: 0.85, Priority.HIGH: 1.0}
# The part of the queue that they may fill.
QUEUE_SHARES = {Priority.LOW: 0.5, Priority.NORMAL: 1.0, Priority.HIGH: 1.0}


@dataclass(slots=True)
class _Times:
    """A line through the times that forwards took, by what was ahead of them. Older ones count less."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, ahead: int, took_s: float) -> None:
        """One more answer."""
        self.weight = self.weight * _MEMORY + 1
        self.x = self.x * _MEMORY + ahead
        self.y = self.y * _MEMORY + took_s
        self.xx = self.xx * _MEMORY + ahead * ahead
        self.xy = self.xy * _MEMORY + ahead * took_s

    @property
    def slope_s(self) -> float:
        """What a unit of cost takes. 0: not known."""
        spread = self.weight * self.xx - self.x * self.x
        if self.weight < _FEW_ANSWERS * _MEMORY**_FEW_ANSWERS or spread <= self.x * self.x * _LEAST_SPREAD:
            return 0.0
        slope_s = (self.weight * self.xy - self.x * self.y) / spread
        # Nothing takes less than no time, with nothing ahead neither.
        return min(max(slope_s, 0.0), self.y / self.x)

    def expected_s(self, ahead: int) -> float:
        """How long with so much ahead. Rather too little than too much where that is not known."""
        if self.weight < _FEW_ANSWERS * _MEMORY**_FEW_ANSWERS:
            return 0.0
        slope_s = self.slope_s
        if slope_s:
            return max(0.0, (self.y + slope_s * (ahead * self.weight - self.x)) / self.weight)
        return self.y / self.weight * min(1.0, ahead * self.weight / self.x)


@dataclass(slots=True)
class _Lane:
    """Forwards of one class that a worker has and has not answered."""

    # What they cost, by priority.
    cost: list[int] = field(default_factory=lambda: [0] * len(Priority))
    by_caller: dict[int, int] = field(default_factory=dict)
    times: _Times = field(default_factory=_Times)

    def ahead(self, cost: int, caller: int, priority: Priority) -> int:
        """What is done before a forward of `caller` is, itself included."""
        before = cost + sum(self.cost[priority:])
        own = cost + self.by_caller.get(caller, 0)
        callers = len(self.by_caller) + (caller not in self.by_caller)
        return min(before, own * callers)


@dataclass(slots=True)
class Waiting:
    """One forward that a worker has: what it costs, and what was ahead of it when it came."""

    lane: _Lane
    cost: int
    caller: int
    priority: Priority
    ahead: int
    since_s: float


class Backlog:
    """What one worker has to do. Owner of the forwards it was sent, until they are answered or taken back."""

    def __init__(self) -> None:
        self._short = _Lane()
        self._long = _Lane()

    def expected_s(self, append: Append, caller: int) -> float:
        """How long until an append would be answered. 0: not known, or nothing is ahead of it."""
        lane, cost = self._lane(append), _cost(append)
        ahead = lane.ahead(cost, caller, append.priority)
        return lane.times.expected_s(ahead) if ahead > cost else 0.0

    def start_within_s(self, append: Append, caller: int, left_s: float) -> float:
        """By when it has to begin to end in `left_s`: less its own work, if anything is ahead of it."""
        lane, cost = self._lane(append), _cost(append)
        if lane.ahead(cost, caller, append.priority) == cost:
            return left_s
        return max(left_s - lane.times.slope_s * cost, 0.0)

    @staticmethod
    def is_long(append: Append) -> bool:
        """Whether it waits for as long as others of its kind need, and not only for a step or two."""
        return len(append.token_ids) > _SHORT_TOKENS

    def enter(self, append: Append, caller: int, now_s: float) -> Waiting:
        """The worker is asked for it. Every one has to `leave`."""
        lane, cost, priority = self._lane(append), _cost(append), append.priority
        waiting = Waiting(lane, cost, caller, priority, lane.ahead(cost, caller, priority), now_s)
        lane.cost[priority] += cost
        lane.by_caller[caller] = lane.by_caller.get(caller, 0) + cost
        return waiting

    def leave(self, waiting: Waiting, now_s: float, *, answered: bool) -> None:
        """It is answered, or taken back: then it would have taken longer, which also says something."""
        lane = waiting.lane
        lane.cost[waiting.priority] -= waiting.cost
        left = lane.by_caller[waiting.caller] - waiting.cost
        if left:
            lane.by_caller[waiting.caller] = left
        else:
            del lane.by_caller[waiting.caller]
        took_s = now_s - waiting.since_s
        if answered or took_s > lane.times.expected_s(waiting.ahead):
            lane.times.add(waiting.ahead, took_s)

    def check(self, all_waiting: list[Waiting]) -> None:
        """Raises AssertionError if this is not what there is."""
        for lane in (self._short, self._long):
            its = [waiting for waiting in all_waiting if waiting.lane is lane]
            callers = {waiting.caller for waiting in its}
            assert lane.by_caller == {c: sum(w.cost for w in its if w.caller == c) for c in callers}
            assert lane.cost == [sum(w.cost for w in its if w.priority is p) for p in Priority]

    def _lane(self, append: Append) -> _Lane:
        return self._long if self.is_long(append) else self._short


def _cost(append: Append) -> int:
    return len(append.token_ids) + append.rows
