"""Hourly budgets of all providers, stored in the journal so that they survive a restart.

The expected cost of a request is stored before the request is sent. So after a crash at any moment the next
server counts at least the money that was spent.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable

from service.errors import StorageUnavailable
from service.extensions.providers.clock import Clock
from service.journal.values import StoredValues
from service.logging import get_logger

_log = get_logger(__name__)
_NAME = "providers/spending"
# The longest time that a request waits until its cost is stored.
_LONGEST_S = 10.0
_HOUR_S = 3600.0
# Spending is grouped by minute, which bounds the number of entries per hour.
_GRAIN_S = 60.0


class HourlyBudget:
    """A budget in US dollars for a sliding hour. The expected cost is reserved before it is spent."""

    def __init__(self, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._reserved_usd = 0.0
        # Spending of each minute, by the time when it no longer counts.
        self._spent: dict[float, float] = {}

    def wait_s(self, usd: float, now_s: float) -> float:
        """The time until the next check. 0: the budget suffices. Infinite: waiting alone does not help."""
        free_usd = self.limit_usd - self.used_usd(now_s)
        if usd <= free_usd:
            return 0.0
        if usd > self.limit_usd:
            return math.inf
        return min(self._spent, default=math.inf) - now_s

    def used_usd(self, now_s: float) -> float:
        """The money spent in the last hour, plus reservations. Drops expired entries."""
        self._spent = {expires_s: usd for expires_s, usd in self._spent.items() if expires_s > now_s}
        return self._reserved_usd + sum(self._spent.values())

    def reserve(self, usd: float) -> None:
        self._reserved_usd += usd

    def settle(self, reserved_usd: float, spent_usd: float, now_s: float) -> None:
        """Replaces a reservation by the actual cost."""
        self._reserved_usd = max(0.0, self._reserved_usd - reserved_usd)
        if spent_usd:
            expires_s = _expires_s(now_s)
            self._spent[expires_s] = self._spent.get(expires_s, 0.0) + spent_usd

    def remaining_usage(self, now_s: float) -> list[tuple[float, float]]:
        """Pairs of (seconds until it expires, US dollars). Reservations count as spent now."""
        self.used_usd(now_s)
        used = [*self._spent.items(), (_expires_s(now_s), self._reserved_usd)]
        return [(expires_s - now_s, usd) for expires_s, usd in used if usd]

    def restore(self, remaining_usage: Iterable[tuple[float, float]], now_s: float) -> None:
        """Adds the spending of an earlier process. No entry counts for longer than if it were spent now."""
        for left_s, usd in remaining_usage:
            expires_s = min(now_s + left_s, _expires_s(now_s))
            self._spent[expires_s] = self._spent.get(expires_s, 0.0) + usd


def _expires_s(now_s: float) -> float:
    """When spending at `now_s` stops counting: an hour after the end of its minute, never sooner."""
    return (math.floor(now_s / _GRAIN_S) + 1) * _GRAIN_S + _HOUR_S


class Spending:
    """Owner of the budgets, by runtime name."""

    def __init__(self, values: StoredValues | None = None, clock: Clock | None = None) -> None:
        """Restores the spending from `values`. Without them nothing is stored."""
        self._values = StoredValues() if values is None else values
        self._clock = clock or Clock()
        self._budgets: dict[str, HourlyBudget] = {}
        self._has_failed = False
        self._restore()

    def budget(self, runtime: str, limit_usd: float) -> HourlyBudget:
        """Returns the budget of a runtime, after setting its limit."""
        budget = self._budgets.setdefault(runtime, HourlyBudget(limit_usd))
        budget.limit_usd = limit_usd
        return budget

    def save(self) -> None:
        self._values.put(_NAME, self._encode())

    async def flush(self) -> None:
        """Waits until the current state is stored. A failure is logged; the budgets in memory still apply."""
        try:
            async with asyncio.timeout(_LONGEST_S):
                await self._values.set({_NAME: self._encode()})
        except (StorageUnavailable, TimeoutError) as error:
            if not self._has_failed:
                why = (
                    error.message if isinstance(error, StorageUnavailable) else "the journal does not answer"
                )
                _log.warning("a restart will forget what providers have cost", error=why)
            self._has_failed = True
        else:
            self._has_failed = False

    def _encode(self) -> bytes:
        now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        used = {
            runtime: [(wall_s + left_s, usd) for left_s, usd in remaining_usage]
            for runtime, budget in self._budgets.items()
            if (remaining_usage := budget.remaining_usage(now_s))
        }
        return json.dumps(used).encode()

    def _restore(self) -> None:
        now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        for runtime, used in json.loads(self._values.get(_NAME) or b"{}").items():
            remaining_usage = [(until_s - wall_s, usd) for until_s, usd in used]
            self.budget(runtime, 0.0).restore(remaining_usage, now_s)
