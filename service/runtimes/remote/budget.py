"""What may be spent within any hour. Pure: the time is given."""

from __future__ import annotations

import math
from collections.abc import Iterable

_HOUR_S = 3600.0
# Spending is remembered by the minute, so that an hour of it takes no more than so many entries.
_GRAIN_S = 60.0


class HourlyBudget:
    """US dollars. What is expected is reserved before it is spent."""

    def __init__(self, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._reserved_usd = 0.0
        # What was spent in a minute, by when that leaves the hour.
        self._spent: dict[float, float] = {}

    def wait_s(self, usd: float, now_s: float) -> float:
        """After which time to ask again; 0: there is room; infinite: time alone does not help."""
        free_usd = self.limit_usd - self.used_usd(now_s)
        if usd <= free_usd:
            return 0.0
        if usd > self.limit_usd:
            return math.inf
        return min(self._spent, default=math.inf) - now_s

    def used_usd(self, now_s: float) -> float:
        """What was spent in the last hour, and what is reserved."""
        self._spent = {leaves_s: usd for leaves_s, usd in self._spent.items() if leaves_s > now_s}
        return self._reserved_usd + sum(self._spent.values())

    def reserve(self, usd: float) -> None:
        """A request is sent that is expected to cost so much."""
        self._reserved_usd += usd

    def settle(self, reserved_usd: float, spent_usd: float, now_s: float) -> None:
        """It has cost so much instead."""
        self._reserved_usd = max(0.0, self._reserved_usd - reserved_usd)
        if spent_usd:
            leaves_s = _leaves_s(now_s)
            self._spent[leaves_s] = self._spent.get(leaves_s, 0.0) + spent_usd

    def used_for_s(self, now_s: float) -> list[tuple[float, float]]:
        """For how many more seconds how much is used; what is reserved as if it were spent now."""
        self.used_usd(now_s)
        used = [*self._spent.items(), (_leaves_s(now_s), self._reserved_usd)]
        return [(leaves_s - now_s, usd) for leaves_s, usd in used if usd]

    def restore(self, used_for_s: Iterable[tuple[float, float]], now_s: float) -> None:
        """What an earlier process has used counts, none of it for longer than if it were spent now."""
        for left_s, usd in used_for_s:
            leaves_s = min(now_s + left_s, _leaves_s(now_s))
            self._spent[leaves_s] = self._spent.get(leaves_s, 0.0) + usd


def _leaves_s(now_s: float) -> float:
    """To the end of its minute: an hour's spending is never counted for less than an hour."""
    return (math.floor(now_s / _GRAIN_S) + 1) * _GRAIN_S + _HOUR_S
