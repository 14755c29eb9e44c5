"""A clock that stops while the gateway is stopped, for the timeouts of workers and clients.

Pure: the caller passes time in, tick by tick. A late tick, because the gateway was stopped or its event loop
was blocked, counts as two ticks at most: messages that arrived meanwhile are not read yet.
"""

from __future__ import annotations

_MAX_BEATS_CHARGED = 2


class RunningClock:
    """Starts at 0."""

    def __init__(self, tick_s: float) -> None:
        """`tick_s`: the intended time between ticks."""
        self._tick_s = tick_s
        self.now_s = 0.0

    def tick(self, elapsed_s: float) -> None:
        """Advances the clock by the time since the last tick."""
        self.now_s += min(elapsed_s, _MAX_BEATS_CHARGED * self._tick_s)
