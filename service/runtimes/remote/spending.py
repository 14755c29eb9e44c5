"""The hourly budgets of all providers, kept for the next server: `spending.json` in the data directory.

What a request is expected to cost is on the disk before the request is sent: a server that ends at any moment
is followed by one that counts at least as much.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

from service import durable_file
from service.logging import get_logger
from service.runtimes.remote.budget import HourlyBudget
from service.runtimes.remote.clock import Clock

_log = get_logger(__name__)
_NAME = "spending.json"
_MAX_BYTES = 1 << 24


class Spending:
    """Owner of the budgets, by the names of their runtimes. Without a directory nothing is written down."""

    def __init__(self, data_dir: Path | None = None, clock: Clock | None = None) -> None:
        """Reads what was written down; what cannot be used is logged, and left out. Raises nothing."""
        self._path = None if data_dir is None else data_dir / _NAME
        self._clock = clock or Clock()
        self._budgets: dict[str, HourlyBudget] = {}
        # At most one write is under way, and one waits for it, which will write all that is used by then.
        self._writing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._has_failed = False
        self._read()

    def budget(self, runtime: str, limit_usd: float) -> HourlyBudget:
        """The budget of a runtime, which has this limit from now on."""
        budget = self._budgets.setdefault(runtime, HourlyBudget(limit_usd))
        budget.limit_usd = limit_usd
        return budget

    def save(self) -> None:
        """Begins to write down what is used."""
        if self._path is not None and self._next is None:
            self._next = asyncio.create_task(self._write(self._path, self._writing), name="spending")

    async def saved(self) -> None:
        """Returns when what is used now is written down. A failure is logged: the budgets themselves hold."""
        self.save()
        if self._next is not None:
            await asyncio.shield(self._next)

    async def _write(self, path: Path, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        self._writing, self._next = self._next, None
        now_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        used = {
            runtime: [(wall_s + left_s, usd) for left_s, usd in used_for_s]
            for runtime, budget in self._budgets.items()
            if (used_for_s := budget.used_for_s(now_s))
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
                used_for_s = [(float(until_s) - wall_s, float(usd)) for until_s, usd in used]
                if not all(math.isfinite(left_s) and 0 <= usd < math.inf for left_s, usd in used_for_s):
                    raise ValueError("a number is not what it should be")
                self.budget(runtime, 0.0).restore(used_for_s, now_s)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("cannot tell what providers have cost", path=str(self._path), error=str(error))
