"""How long the event loop was kept from everybody else, at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# A stretch of work is seen but for up to this much of its beginning. Looking costs a thousandth of a core.
_INTERVAL_S = 0.01


class LoopWatch:
    """Looks at the clock at even intervals: when it is late, somebody kept the loop, or the process slept."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self.longest_stretch_s = 0.0

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            before_s = self._clock_s()
            await asyncio.sleep(_INTERVAL_S)
            self.longest_stretch_s = max(self.longest_stretch_s, self._clock_s() - before_s - _INTERVAL_S)
