"""Estimates how long a forward will take, and refuses one that would take too long. Pure.

It counts the queue of a worker, and how long recent forwards took.

There are two queues, as in the worker: short forwards (decodes) and long ones. What is ahead of a new
forward is counted in tokens and rows, with fair queueing: a caller with hundreds of forwards delays only
itself. The time is a linear fit of the times of recent forwards over what was ahead of them. It adapts
within some fifty answers. It is not used if nothing is ahead, so a wrong estimate does not refuse requests
for long.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from service.caches.requests import HIGH, NORMAL, Priority
from service.errors import DeadlinePassed, Overloaded

# The longest short forward. As in the worker.
_SHORT_TOKENS = 16
# For the expected wait of a new sequence.
TYPICAL_PROMPT_TOKENS = 256
# What a token costs whose KV is read from disk: a page of 16 tokens as much as one that is computed.
_READ_COST = 1 / 16
# The weight of the latest replay beside that of all before it.
_REPLAY_NEWS = 0.25
# The weight of older answers is multiplied by this at each new one.
_DECAY = 0.98
# With less weight than this there is no estimate.
_MIN_WEIGHT = 4.5
# The most by which one answer can exceed the estimate: this factor, and this many seconds.
_MOST_TIMES = 4
_LEAST_NEWS_S = 0.25
# If all waits were about equal, the slope cannot be computed.
_LEAST_SPREAD = 1 / 256
# The estimate may be at most this part of the time left. The rest is a reserve. High priorities have none, so
# they are refused last.
_TIME_SHARES = {Priority.LOW: 0.5, Priority.NORMAL: 0.85, Priority.HIGH: 1.0}


@dataclass(slots=True)
class _LatencyModel:
    """A linear fit of the times of forwards over what was ahead of them. Older ones have less weight."""

    # Time for a unit of cost. 0: not known yet.
    slope_s: float = 0.0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    # Answers with the same time that are not in the fit yet: their number and sums. They were computed
    # together, and count as one, their mean.
    now_s: float = -math.inf
    answers: int = 0
    ahead: int = 0
    took_s: float = 0.0

    def late(self, ahead: int, took_s: float) -> None:
        """Adds a forward that was not answered by its deadline, if that is longer than the estimate."""
        self.take_in(self.now_s)
        if took_s > self.expected_s(ahead):
            self.answers, self.ahead, self.took_s = 1, ahead, took_s
            self.take_in(self.now_s)

    def take_in(self, now_s: float) -> None:
        """The answers so far become part of the fit. The next ones have the time `now_s`."""
        self.now_s = now_s
        if not self.answers:
            return
        ahead, took_s = self.ahead / self.answers, self.took_s / self.answers
        self.answers, self.ahead, self.took_s = 0, 0, 0.0
        if took_s > _LEAST_NEWS_S and self.weight >= _MIN_WEIGHT:
            # An outlier is probably a pause of the machine.
            took_s = min(took_s, _MOST_TIMES * self.expected_s(ahead) + _LEAST_NEWS_S)
        self.weight = self.weight * _DECAY + 1
        self.x = self.x * _DECAY + ahead
        self.y = self.y * _DECAY + took_s
        self.xx = self.xx * _DECAY + ahead * ahead
        self.xy = self.xy * _DECAY + ahead * took_s
        spread = self.weight * self.xx - self.x * self.x
        if spread > self.x * self.x * _LEAST_SPREAD:
            self.slope_s = max((self.weight * self.xy - self.x * self.y) / spread, 0.0)
        # The time with nothing ahead is not negative.
        self.slope_s = min(self.slope_s, self.y / self.x)

    def expected_s(self, ahead: float) -> float:
        """The estimated time. If unsure, rather too short than too long."""
        if self.weight < _MIN_WEIGHT:
            return 0.0
        mean_s, more = self.y / self.weight, ahead - self.x / self.weight
        if self.slope_s:
            return mean_s + self.slope_s * more
        return mean_s * min(1.0, ahead * self.weight / self.x)


@dataclass(slots=True)
class _Queue:
    """The unanswered forwards of a worker, either the short or the long ones."""

    # Cost by priority, and by caller.
    cost: list[int] = field(default_factory=lambda: [0] * len(Priority))
    by_caller: dict[int, int] = field(default_factory=dict)
    # By priority: each waits for different forwards.
    times: list[_LatencyModel] = field(default_factory=lambda: [_LatencyModel() for _ in Priority])


def retry_after_s(wait_s: float) -> float:
    """When a client that was refused should retry, if it would have waited for so long."""
    return min(max(wait_s, 0.05), 5.0)


class End(enum.Enum):
    """How an attempt ended."""

    ANSWERED = enum.auto()
    # Not answered by its deadline.
    LATE = enum.auto()
    # Cancelled or failed. Says nothing about time.
    TAKEN_BACK = enum.auto()


@dataclass(slots=True, eq=False)
class Forward:
    """What a load knows of a forward: an operation."""

    ticket: int
    # Callers take turns. 0: a caller of its own.
    caller: int
    # None: no deadline.
    deadline_s: float | None

    # Written by `WorkerLoad.enter`: its own cost, and that up to and including it, in tokens and rows; and
    # when it was sent.
    priority: Priority = field(default=NORMAL, init=False)
    is_long: bool = field(default=False, init=False)
    cost: int = field(default=0, init=False)
    total: int = field(default=0, init=False)
    since_s: float = field(default=0.0, init=False)


class WorkerLoad:
    """The queued work of one worker."""

    def __init__(self) -> None:
        # The short and the long forwards.
        self._queues = (_Queue(), _Queue())
        # What a token of a replay costs: 1, or less if recent ones were not computed.
        self._replay_cost = 1.0

    def enter(
        self,
        forward: Forward,
        tokens: int,
        rows: int,
        priority: Priority,
        wait_s: float,
        now_s: float,
        *,
        is_replay: bool = False,
    ) -> float:
        """A forward is sent now, after those that come before it: it counts until it leaves.

        Returns within which time it has to begin, at most `wait_s`. Raises Overloaded or DeadlinePassed if it
        would not be done in time: then it does not count.
        """
        is_long, cost = tokens > _SHORT_TOKENS, tokens + rows
        if is_replay:
            cost = math.ceil(tokens * self._replay_cost) + rows
        queue, caller = self._queues[is_long], forward.caller or -forward.ticket
        low, normal, high = queue.cost
        before = high
        if priority < HIGH:
            before += normal if priority else normal + low
        own = queue.by_caller.get(caller, 0)
        callers = len(queue.by_caller) + (not own)
        forward.priority, forward.is_long, forward.cost, forward.since_s = priority, is_long, cost, now_s
        forward.total = min(cost + before, (cost + own) * callers)
        if is_long or forward.deadline_s is not None:
            wait_s = _require_time(forward, queue.times[priority], wait_s, now_s)
        queue.cost[priority] += cost
        queue.by_caller[caller] = own + cost
        return wait_s

    def replayed(self, tokens: int, reused_tokens: int) -> None:
        """Takes into account that so many of the tokens of a replay were not computed, but read."""
        cost = 1 - reused_tokens / tokens * (1 - _READ_COST)
        self._replay_cost += _REPLAY_NEWS * (cost - self._replay_cost)

    def leave(self, forwards: Iterable[Forward], now_s: float, end: End) -> None:
        is_answered = end is End.ANSWERED
        for forward in forwards:
            queue, priority, cost = self._queues[forward.is_long], forward.priority, forward.cost
            caller = forward.caller or -forward.ticket
            queue.cost[priority] -= cost
            left = queue.by_caller[caller] - cost
            if left:
                queue.by_caller[caller] = left
            else:
                del queue.by_caller[caller]
            times = queue.times[priority]
            if is_answered:
                if times.now_s != now_s:
                    times.take_in(now_s)
                times.answers += 1
                times.ahead += forward.total
                times.took_s += now_s - forward.since_s
            elif end is End.LATE:
                times.late(forward.total, now_s - forward.since_s)

    def total_for(self, tokens: int) -> int:
        """The cost up to and including a prompt of a new caller, if it came now. As `enter`."""
        queue, cost = self._queues[tokens > _SHORT_TOKENS], tokens + 1
        _, normal, high = queue.cost
        return min(cost + normal + high, cost * (len(queue.by_caller) + 1))

    def expected_wait_s(self, tokens: int = TYPICAL_PROMPT_TOKENS) -> float:
        """The estimated wait of a new caller with so many tokens."""
        total, times = self.total_for(tokens), self._queues[tokens > _SHORT_TOKENS].times[Priority.NORMAL]
        return times.expected_s(total) if total > tokens + 1 else 0.0


def _require_time(forward: Forward, times: _LatencyModel, wait_s: float, now_s: float) -> float:
    """See `WorkerLoad.enter`. `times`: those of forwards like this one."""
    is_first = forward.total <= forward.cost
    # 0: unknown, or nothing is ahead.
    expected_s = 0.0 if is_first else times.expected_s(forward.total)
    # At least so much of that is its own computation.
    own_s = times.slope_s * forward.cost
    if forward.deadline_s is None:
        # Without a deadline only the queueing delay is limited.
        expected_s -= own_s
        if expected_s > wait_s:
            raise Overloaded(expected_s, max(wait_s, 0.0), retry_after_s(expected_s - wait_s))
        return wait_s
    left_s = forward.deadline_s - now_s
    if left_s <= 0:
        raise DeadlinePassed
    may_take_s = left_s * _TIME_SHARES[forward.priority]
    if expected_s > may_take_s:
        raise Overloaded(expected_s, may_take_s, retry_after_s(expected_s - may_take_s))
    return min(left_s if is_first else max(left_s - own_s, 0.0), wait_s)
