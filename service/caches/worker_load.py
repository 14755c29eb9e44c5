"""Estimates how long a forward will take on a worker, and refuses one that would take too long. Pure.

As in the worker, there are two queues: short forwards (decodes) and long ones. The work ahead of a new
forward is counted in tokens and rows, with fair queueing: a caller with hundreds of forwards delays only
itself. The time is a linear fit of the times of recent forwards over the work that was ahead of them. It
adapts within about fifty answers. It is not used if nothing is ahead, so a wrong estimate does not refuse
requests for long.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from service.caches.requests import HIGH, NORMAL, Priority
from service.errors import DeadlinePassed, Overloaded

# The most tokens of a short forward. As in the worker.
_SHORT_TOKENS = 16
# For the expected wait of a new sequence.
TYPICAL_PROMPT_TOKENS = 256
# The cost of a token whose KV is read from disk. A page of 16 tokens costs as much as one computed token.
_READ_COST = 1 / 16
# The weight of the latest replay in the moving average of their cost.
_REPLAY_WEIGHT = 0.25
# The weight of older answers is multiplied by this at each new one.
_DECAY = 0.98
# There is no estimate while the total weight is below this.
_MIN_WEIGHT = 4.5
# An outlier is limited to this multiple of the estimate, plus this time.
_OUTLIER_FACTOR = 4
_OUTLIER_S = 0.25
# With less variance in the work ahead than this, relative to its squared mean, the slope cannot be computed.
_MIN_SPREAD = 1 / 256
# The part of the time left that the estimate may take. The rest is a reserve. High priorities have none, so
# they are refused last.
_TIME_SHARES = {Priority.LOW: 0.5, Priority.NORMAL: 0.85, Priority.HIGH: 1.0}


@dataclass(slots=True)
class _LatencyModel:
    """A linear fit of the times of forwards over what was ahead of them. Older ones have less weight."""

    # Seconds for a unit of cost. 0: not known yet.
    slope_s: float = 0.0
    # Decayed sums: x is the work ahead, y the time.
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    # Answers that arrived at `now_s` and are not in the fit yet: their number and sums. They were computed in
    # one step, so their mean counts as one answer.
    now_s: float = -math.inf
    answers: int = 0
    ahead: int = 0
    took_s: float = 0.0

    def add_late(self, ahead: int, took_s: float) -> None:
        """Adds a forward that was not answered by its deadline, if `took_s` exceeds the estimate."""
        self.take_in(self.now_s)
        if took_s > self.expected_s(ahead):
            self.answers, self.ahead, self.took_s = 1, ahead, took_s
            self.take_in(self.now_s)

    def take_in(self, now_s: float) -> None:
        """Adds the collected answers to the fit. The next ones arrive at `now_s`."""
        self.now_s = now_s
        if not self.answers:
            return
        ahead, took_s = self.ahead / self.answers, self.took_s / self.answers
        self.answers, self.ahead, self.took_s = 0, 0, 0.0
        if took_s > _OUTLIER_S and self.weight >= _MIN_WEIGHT:
            # An outlier is probably a pause of the machine.
            took_s = min(took_s, _OUTLIER_FACTOR * self.expected_s(ahead) + _OUTLIER_S)
        self.weight = self.weight * _DECAY + 1
        self.x = self.x * _DECAY + ahead
        self.y = self.y * _DECAY + took_s
        self.xx = self.xx * _DECAY + ahead * ahead
        self.xy = self.xy * _DECAY + ahead * took_s
        spread = self.weight * self.xx - self.x * self.x
        if spread > self.x * self.x * _MIN_SPREAD:
            self.slope_s = max((self.weight * self.xy - self.x * self.y) / spread, 0.0)
        # The time with nothing ahead is not negative.
        self.slope_s = min(self.slope_s, self.y / self.x)

    def expected_s(self, ahead: float) -> float:
        """The estimated time. In doubt it is too short rather than too long."""
        if self.weight < _MIN_WEIGHT:
            return 0.0
        mean_s, more = self.y / self.weight, ahead - self.x / self.weight
        if self.slope_s:
            return mean_s + self.slope_s * more
        return mean_s * min(1.0, ahead * self.weight / self.x)


@dataclass(slots=True)
class _Queue:
    """The unanswered forwards of a worker, either the short or the long ones."""

    # Their cost by priority, and by caller.
    cost: list[int] = field(default_factory=lambda: [0] * len(Priority))
    by_caller: dict[int, int] = field(default_factory=dict)
    # By priority, since each waits for other forwards.
    times: list[_LatencyModel] = field(default_factory=lambda: [_LatencyModel() for _ in Priority])


def retry_after_s(wait_s: float) -> float:
    """After what time a refused client should retry, if it would have waited for `wait_s`."""
    return min(max(wait_s, 0.05), 5.0)


class End(enum.Enum):
    """How an attempt ended."""

    ANSWERED = enum.auto()
    # Not answered by its deadline.
    LATE = enum.auto()
    # Cancelled or failed. Says nothing about time.
    ABORTED = enum.auto()


@dataclass(slots=True, eq=False)
class QueuedForward:
    """The fields of an operation that `WorkerLoad` uses."""

    ticket: int
    # For fair queueing. 0: a caller of its own.
    caller: int
    # None: no deadline.
    deadline_s: float | None

    # Written by `WorkerLoad.enter`. `cost`: its own, in tokens and rows; `total`: including the work ahead;
    # `since_s`: when it was sent.
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
        # The cost of a replayed token: 1, or less if recent replays were partly read instead of computed.
        self._replay_cost = 1.0

    def enter(
        self,
        forward: QueuedForward,
        tokens: int,
        rows: int,
        priority: Priority,
        wait_s: float,
        now_s: float,
        *,
        is_replay: bool = False,
    ) -> float:
        """Counts a forward that is sent now, until it leaves. Returns the time within which it has to begin.

        That is at most `wait_s`. Raises Overloaded or DeadlinePassed, without counting it, if it could not be
        done in time.
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
        """Learns from a replay of `tokens`, of which `reused_tokens` were read instead of computed."""
        cost = 1 - reused_tokens / tokens * (1 - _READ_COST)
        self._replay_cost += _REPLAY_WEIGHT * (cost - self._replay_cost)

    def leave(self, forwards: Iterable[QueuedForward], now_s: float, end: End) -> None:
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
                times.add_late(forward.total, now_s - forward.since_s)

    def total_for(self, tokens: int) -> int:
        """The work up to the end of a prompt that a new caller would send now. As in `enter`."""
        queue, cost = self._queues[tokens > _SHORT_TOKENS], tokens + 1
        _, normal, high = queue.cost
        return min(cost + normal + high, cost * (len(queue.by_caller) + 1))

    def expected_wait_s(self, tokens: int = TYPICAL_PROMPT_TOKENS) -> float:
        """The estimated wait of a new caller with so many tokens."""
        total, times = self.total_for(tokens), self._queues[tokens > _SHORT_TOKENS].times[Priority.NORMAL]
        return times.expected_s(total) if total > tokens + 1 else 0.0


def _require_time(forward: QueuedForward, times: _LatencyModel, wait_s: float, now_s: float) -> float:
    """See `WorkerLoad.enter`. `times`: of forwards in the same queue with the same priority."""
    is_first = forward.total <= forward.cost
    # 0: unknown, or nothing is ahead.
    expected_s = 0.0 if is_first else times.expected_s(forward.total)
    # At least this much of that is its own computation.
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
