"""Long work in slices, so that the event loop serves everybody else in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# For how long one keeps the loop in one go. Far less than the 20 ms that are promised: a unit may be begun
# late, and a call of somebody else's needs several turns of the loop.
SLICE_S = 0.002


class Breather:
    """Knows since when its owner has kept the loop."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self.begin()

    def begin(self) -> None:
        """Others ran just now."""
        self._until_s = self._clock_s() + SLICE_S

    @property
    def due(self) -> bool:
        """Whether others should run now."""
        return self._clock_s() >= self._until_s

    async def breathe(self) -> None:
        """Lets others run."""
        await asyncio.sleep(0)
        self.begin()
