"""Whether what is asked can be done in time: what waits at a worker, and how long the like of it took lately.

Pure: no clock, no I/O. Forwards of a worker wait in two lanes, as they do in it: short ones, whose callers
wait for every token, and long ones. What stands ahead of a new one is counted in tokens and rows, and as the
worker lets callers take turns: who has hundreds queued stands before nobody but himself. How long it takes is
a straight line through what forwards took that had so much ahead. It bends with the load within some fifty
answers, and is never asked where nothing is ahead: so a wrong guess refuses nobody for long.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.caches.requests import Append, Priority

# No more tokens than this are short. As in the worker.
_SHORT_TOKENS = 16
# As workers count: a draw more from a row takes a part of what a row does.
_DRAWS_PER_ROW = 16
# How much of what was learnt an older answer still counts for, at the next.
_MEMORY = 0.98
# Less than so many answers tell nothing.
_FEW_ANSWERS = 4.5
# How much more than was expected one answer can say.
_MOST_TIMES = 4
_LEAST_NEWS_S = 0.25
# Answers to waits that are all alike do not tell how much a longer one would take.
_LEAST_SPREAD = 1 / 256
# The part of its time that may be spent on what is expected. The rest is for what is not: less of it for
# those who matter most, who are therefore refused last.
TIME_SHARES = {Priority.LOW: 0.5, Priority.NORMAL: 0.85, Priority.HIGH: 1.0}


@dataclass(slots=True)
class _Times:
    """A line through the times that forwards took, by what was ahead of them. Older ones count less."""

    # What a unit of cost takes, when that could last be told. 0: never.
    slope_s: float = 0.0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    # Answers of the last moment, not taken in yet, and what they have in sum.
    _now_s: float = -math.inf
    _answers: int = 0
    _ahead: int = 0
    _took_s: float = 0.0

    def answered(self, ahead: int, took_s: float, now_s: float) -> None:
        """One more answer. Those of one moment, which were computed together, count as their mean."""
        if now_s != self._now_s:
            self._take_in()
            self._now_s = now_s
        self._answers += 1
        self._ahead += ahead
        self._took_s += took_s

    def late(self, ahead: int, took_s: float) -> None:
        """It was given up after so long: it would have taken longer, which is news if less was expected."""
        self._take_in()
        if took_s > self.expected_s(ahead):
            self._add(ahead, took_s)

    def _take_in(self) -> None:
        if self._answers:
            self._add(self._ahead / self._answers, self._took_s / self._answers)
            self._answers = self._ahead = 0
            self._took_s = 0.0

    def _add(self, ahead: float, took_s: float) -> None:
        if self.weight >= _FEW_ANSWERS:
            # One that is far off says more of a moment, such as a pause, than of what is to come.
            took_s = min(took_s, _MOST_TIMES * self.expected_s(ahead) + _LEAST_NEWS_S)
        self.weight = self.weight * _MEMORY + 1
        self.x = self.x * _MEMORY + ahead
        self.y = self.y * _MEMORY + took_s
        self.xx = self.xx * _MEMORY + ahead * ahead
        self.xy = self.xy * _MEMORY + ahead * took_s
        spread = self.weight * self.xx - self.x * self.x
        if spread > self.x * self.x * _LEAST_SPREAD:
            self.slope_s = max((self.weight * self.xy - self.x * self.y) / spread, 0.0)
        # Nothing takes less than no time, with nothing ahead neither.
        self.slope_s = min(self.slope_s, self.y / self.x)

    def expected_s(self, ahead: float) -> float:
        """How long with so much ahead. Rather too little than too much where that is not known."""
        if self.weight < _FEW_ANSWERS:
            return 0.0
        mean_s, more = self.y / self.weight, ahead - self.x / self.weight
        if self.slope_s:
            return mean_s + self.slope_s * more
        return mean_s * min(1.0, ahead * self.weight / self.x)


@dataclass(slots=True)
class _Lane:
    """Forwards of one class that a worker has and has not answered."""

    is_long: bool
    # What they cost, by priority, and by caller.
    cost: list[int] = field(default_factory=lambda: [0] * len(Priority))
    by_caller: dict[int, int] = field(default_factory=dict)
    # Each priority waits for others than the next.
    times: list[_Times] = field(default_factory=lambda: [_Times() for _ in Priority])


class Leaving(enum.Enum):
    """Why a worker has something no longer to do."""

    ANSWERED = enum.auto()
    # At its deadline.
    LATE = enum.auto()
    # For reasons of its caller's own, or of the worker's: that says nothing of time.
    TAKEN_BACK = enum.auto()


@dataclass(slots=True)
class Ahead:
    """One forward for a worker: what it costs, and what is ahead of it. Counted from `enter` to `leave`."""

    lane: _Lane
    cost: int
    caller: int
    priority: Priority
    # Itself included.
    total: int
    since_s: float = 0.0

    @property
    def is_long(self) -> bool:
        """Whether it waits for as long as others of its kind need, and not only for a step or two."""
        return self.lane.is_long

    def expected_s(self) -> float:
        """How long until it would be answered. 0: not known, or nothing is ahead of it."""
        return self._times.expected_s(self.total) if self.total > self.cost else 0.0

    def own_s(self) -> float:
        """What of that is its own work, at least."""
        return self._times.slope_s * self.cost

    def start_within_s(self, left_s: float) -> float:
        """By when it has to begin to end in `left_s`: less its own work, if anything is ahead of it."""
        return max(left_s - self.own_s(), 0.0) if self.total > self.cost else left_s

    @property
    def _times(self) -> _Times:
        return self.lane.times[self.priority]


class WorkerLoad:
    """What one worker has to do. Owner of the forwards it was sent, until they are answered or taken back."""

    def __init__(self) -> None:
        self._short = _Lane(is_long=False)
        self._long = _Lane(is_long=True)

    def look(self, append: Append, caller: int) -> Ahead:
        """What would be ahead of an append."""
        tokens = len(append.token_ids)
        lane = self._long if tokens > _SHORT_TOKENS else self._short
        rows = max(append.rows, append.scored) + len(append.sample_seeds) // _DRAWS_PER_ROW
        cost, priority = tokens + rows, append.priority
        low, normal, high = lane.cost
        before = high
        if priority < Priority.HIGH:
            before += normal if priority else normal + low
        own = lane.by_caller.get(caller)
        callers = len(lane.by_caller) + (own is None)
        total = min(cost + before, (cost + (own or 0)) * callers)
        return Ahead(lane, cost, caller, priority, total)

    def enter(self, ahead: Ahead, now_s: float) -> None:
        """The worker is asked for it. Each has to `leave`."""
        lane, ahead.since_s = ahead.lane, now_s
        lane.cost[ahead.priority] += ahead.cost
        lane.by_caller[ahead.caller] = lane.by_caller.get(ahead.caller, 0) + ahead.cost

    def leave(self, ahead: Ahead, now_s: float, end: Leaving) -> None:
        """It is answered, or taken back."""
        lane = ahead.lane
        lane.cost[ahead.priority] -= ahead.cost
        left = lane.by_caller[ahead.caller] - ahead.cost
        if left:
            lane.by_caller[ahead.caller] = left
        else:
            del lane.by_caller[ahead.caller]
        if end is Leaving.ANSWERED:
            lane.times[ahead.priority].answered(ahead.total, now_s - ahead.since_s, now_s)
        elif end is Leaving.LATE:
            lane.times[ahead.priority].late(ahead.total, now_s - ahead.since_s)

    def check(self, all_there: Sequence[Ahead]) -> None:
        """Raises AssertionError if this is not what there is."""
        for lane in (self._short, self._long):
            its = [ahead for ahead in all_there if ahead.lane is lane]
            if not its:
                assert not lane.by_caller and not any(lane.cost)
                continue
            callers = {ahead.caller for ahead in its}
            assert lane.by_caller == {c: sum(a.cost for a in its if a.caller == c) for c in callers}
            assert lane.cost == [sum(a.cost for a in its if a.priority is p) for p in Priority]
