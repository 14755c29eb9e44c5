"""Hourly budgets of all providers, stored in `spending.json` for the next server.

The expected cost of a request is on disk before it is sent. So after a crash at any moment the next server
counts at least what was spent.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import Path

from service import durable_file
from service.extensions.providers.clock import Clock
from service.logging import get_logger

_log = get_logger(__name__)
_NAME = "spending.json"
_MAX_BYTES = 1 << 24
_HOUR_S = 3600.0
# Spending is grouped by minute, which bounds the number of entries per hour.
_GRAIN_S = 60.0


class HourlyBudget:
    """A budget in US dollars for a sliding hour. The expected cost is reserved before it is spent."""

    def __init__(self, limit_usd: float) -> None:
        self.limit_usd = limit_usd
        self._reserved_usd = 0.0
        # Spending per minute, by the time when it no longer counts.
        self._spent: dict[float, float] = {}

    def wait_s(self, usd: float, now_s: float) -> float:
        """When to check again; 0: the budget suffices; infinite: waiting alone does not help."""
        free_usd = self.limit_usd - self.used_usd(now_s)
        if usd <= free_usd:
            return 0.0
        if usd > self.limit_usd:
            return math.inf
        return min(self._spent, default=math.inf) - now_s

    def used_usd(self, now_s: float) -> float:
        """What was spent in the last hour, plus reservations. Drops expired entries."""
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
        """Adds the use of an earlier process. No entry counts for longer than if it were spent now."""
        for left_s, usd in remaining_usage:
            expires_s = min(now_s + left_s, _expires_s(now_s))
            self._spent[expires_s] = self._spent.get(expires_s, 0.0) + usd


def _expires_s(now_s: float) -> float:
    """When spending at `now_s` stops counting: an hour after the end of its minute, never sooner."""
    return (math.floor(now_s / _GRAIN_S) + 1) * _GRAIN_S + _HOUR_S


class Spending:
    """Owner of the budgets, by runtime name. Without a directory nothing is stored."""

    def __init__(self, data_dir: Path | None = None, clock: Clock | None = None) -> None:
        """Reads the file. Unusable contents are logged and ignored. Raises nothing."""
        self._path = None if data_dir is None else data_dir / _NAME
        self._clock = clock or Clock()
        self._budgets: dict[str, HourlyBudget] = {}
        # At most one write is running, and one waits for it, which writes the state as it is by then.
        self._is_writing = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._has_failed = False
        self._read()

    def budget(self, runtime: str, limit_usd: float) -> HourlyBudget:
        """The budget of a runtime. Sets its limit."""
        budget = self._budgets.setdefault(runtime, HourlyBudget(limit_usd))
        budget.limit_usd = limit_usd
        return budget

    def save(self) -> None:
        """Starts to store the current use."""
        if self._path is not None and self._next is None:
            self._next = asyncio.create_task(self._write(self._path), name="spending")

    async def flush(self) -> None:
        """Returns when the current use is stored. A failure is logged; the budgets in memory still apply."""
        self.save()
        if self._next is not None:
            await asyncio.shield(self._next)

    async def _write(self, path: Path) -> None:
        async with self._is_writing:
            self._next = None
            now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
            used = {
                runtime: [(wall_s + left_s, usd) for left_s, usd in remaining_usage]
                for runtime, budget in self._budgets.items()
                if (remaining_usage := budget.remaining_usage(now_s))
            }
            try:
                await asyncio.to_thread(durable_file.write, path, json.dumps(used))
            except OSError as error:
                if not self._has_failed:
                    _log.warning("a restart will forget what providers have cost", error=error.strerror)
                self._has_failed = True
            else:
                self._has_failed = False

    def _read(self) -> None:
        if self._path is None:
            return
        now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        try:
            with self._path.open("rb") as file:
                written = json.loads(file.read(_MAX_BYTES))
            for runtime, used in written.items():
                remaining_usage = [(float(until_s) - wall_s, float(usd)) for until_s, usd in used]
                if not all(math.isfinite(left_s) and 0 <= usd < math.inf for left_s, usd in remaining_usage):
                    raise ValueError("a number is not what it should be")
                self.budget(runtime, 0.0).restore(remaining_usage, now_s)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("cannot tell what providers have cost", path=str(self._path), error=str(error))
