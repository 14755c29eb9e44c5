"""What may be spent within any hour. Pure: the time is given."""

from __future__ import annotations

import math
from collections import deque

_HOUR_S = 3600.0
# Spending is remembered by the minute, so that an hour of it takes no more than so many entries.
_GRAIN_S = 60.0


class HourlyBudget:
    """US dollars. What is expected is reserved before it is spent."""

    def __init__(self, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._reserved_usd = 0.0
        # By minute: when it leaves the hour, and what was spent in it.
        self._spent: deque[tuple[float, float]] = deque()

    def wait_s(self, usd: float, now_s: float) -> float:
        """After which time to ask again; 0: there is room; infinite: time alone does not help."""
        free_usd = self.limit_usd - self.used_usd(now_s)
        if usd <= free_usd:
            return 0.0
        if usd > self.limit_usd:
            return math.inf
        return self._spent[0][0] - now_s if self._spent else math.inf

    def used_usd(self, now_s: float) -> float:
        """What was spent in the last hour, and what is reserved."""
        while self._spent and self._spent[0][0] <= now_s:
            self._spent.popleft()
        return self._reserved_usd + sum(usd for _, usd in self._spent)

    def reserve(self, usd: float) -> None:
        """A request is sent that is expected to cost so much."""
        self._reserved_usd += usd

    def settle(self, reserved_usd: float, spent_usd: float, now_s: float) -> None:
        """It has cost so much instead."""
        self._reserved_usd = max(0.0, self._reserved_usd - reserved_usd)
        # To the end of its minute: an hour's spending is never counted for less than an hour.
        leaves_s = (math.floor(now_s / _GRAIN_S) + 1) * _GRAIN_S + _HOUR_S
        if self._spent and self._spent[-1][0] == leaves_s:
            spent_usd += self._spent.pop()[1]
        if spent_usd:
            self._spent.append((leaves_s, spent_usd))
