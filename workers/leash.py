"""How long a worker lives without a gateway.

While no stream is open the kernel's own timer runs; when it is over, it ends the process: whatever its
threads do then, and also if it was stopped and has just been continued.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

_BEAT_S = 0.25
# A beat that is later than this tells that the process did not run: it was stopped, or a thread kept it.
_LATE_S = 1.0
# A timer of 0 is none.
_AT_ONCE_S = 0.001


def arm(seconds: float) -> None:
    """Ends the process after that time, by SIGALRM. 0 takes it back."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Leash:
    """Counts from its beginning, and from each loss of the stream, until there is another one.

    Who did not run when the stream was lost cannot tell when that was: then it counts from when it last ran,
    the earliest moment it can have been. So no orphan runs for longer than the grace. Times in seconds.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        spent_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        arm: Callable[[float], None] = arm,
    ) -> None:
        """`spent_s` of the grace are over already."""
        self._grace_s = grace_s
        self._now = now
        self._arm = arm
        self._beat_s = self._ran_s = now()
        # What happened while it did not run is learnt a little later than that it did not.
        self._unsure_until_s = self._ran_s
        self._arm(max(_AT_ONCE_S, grace_s - spent_s))

    def hold(self) -> None:
        """A gateway is there."""
        self._arm(0)

    def let_go(self) -> None:
        """It is gone."""
        self.beat()
        self._arm(max(_AT_ONCE_S, self._ran_s + self._grace_s - self._now()))

    def beat(self) -> None:
        """The event loop runs."""
        now_s = self._now()
        if now_s - self._beat_s > _LATE_S:
            self._ran_s, self._unsure_until_s = self._beat_s, now_s + _LATE_S
        elif now_s >= self._unsure_until_s:
            self._ran_s = now_s
        self._beat_s = now_s

    async def run(self) -> None:
        """Beats until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(_BEAT_S)
