"""Ends a worker that has had no gateway for too long.

While no stream is open, a timer of the kernel (ITIMER_REAL) runs. When it expires, SIGALRM ends the process,
whatever its threads do, also if the process was stopped and has just been continued.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

_TICK_S = 0.25
# A tick later than this means that the process did not run: it was stopped, or a thread blocked the loop.
_LATE_S = 1.0
# Setting the kernel's timer to 0 would switch it off.
_MIN_ALARM_S = 0.001


def set_alarm(seconds: float) -> None:
    """End the process by SIGALRM after this time. 0 cancels the alarm."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


class OrphanTimer:
    """Counts down from its creation and from each disconnect, until a gateway connects. Times in seconds.

    A process that did not run when the stream broke cannot tell when that was. Then the time counts from when
    it last ran, the earliest possible moment. So no orphan runs for longer than the grace.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        now: Callable[[], float] = time.monotonic,
        set_alarm: Callable[[float], None] = set_alarm,
    ) -> None:
        self._grace_s = grace_s
        self._now = now
        self._set_alarm = set_alarm
        self._tick_s = self._ran_s = now()
        # After a pause the loop sees the tick first and events of the pause, such as a disconnect, later.
        self._unsure_until_s = self._ran_s
        self._set_alarm(max(_MIN_ALARM_S, grace_s))

    def connected(self) -> None:
        """A gateway has connected: cancel the alarm."""
        self._set_alarm(0)

    def disconnected(self) -> None:
        """The gateway is gone: start the countdown."""
        self.tick()
        self._set_alarm(max(_MIN_ALARM_S, self._ran_s + self._grace_s - self._now()))

    def tick(self) -> None:
        """Record that the event loop runs."""
        now_s = self._now()
        if now_s - self._tick_s > _LATE_S:
            self._ran_s, self._unsure_until_s = self._tick_s, now_s + _LATE_S
        elif now_s >= self._unsure_until_s:
            self._ran_s = now_s
        self._tick_s = now_s

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(_TICK_S)
