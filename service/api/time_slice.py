"""Time slices for long work, so that it does not block the event loop; and measurement of such blocking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# The longest time that work blocks the event loop. Far below the promised 20 ms, because a unit of work may
# start just before the slice ends, and another call needs several turns of the loop.
SLICE_S = 0.002
# The interval of the timer. A blocked stretch is measured as too short by up to this much. The timer costs
# 0.1% of a core.
_INTERVAL_S = 0.01


class TimeSlice:
    """A slice of time in which its owner may block the event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.clock_s = clock_s
        self.begin()

    def begin(self) -> None:
        """Starts a slice. Must be called right after other tasks could run."""
        self.until_s = self.clock_s() + SLICE_S

    @property
    def due(self) -> bool:
        """Whether the slice is over and other tasks should run."""
        return self.clock_s() >= self.until_s

    async def yield_to_others(self) -> None:
        """Lets other tasks run, then starts a new slice."""
        await asyncio.sleep(0)
        self.begin()


class LoopWatch:
    """Measures how long the event loop was blocked, or the process stopped, by the delay of a timer."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self.longest_stretch_s = 0.0

    async def run(self) -> None:
        while True:
            before_s = self._clock_s()
            await asyncio.sleep(_INTERVAL_S)
            self.longest_stretch_s = max(self.longest_stretch_s, self._clock_s() - before_s - _INTERVAL_S)
