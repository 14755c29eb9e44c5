"""A clock that runs only while the gateway does, for judging others by their silence.

Pure: time comes in as beats. One that comes late, because the gateway was stopped or its event loop busy,
counts as little more than one: what others said meanwhile is still unread, and that is not their fault.
"""

from __future__ import annotations

# A beat may come late by as much again before the rest of it is the gateway's own.
_MAX_BEATS_CHARGED = 2


class RunningClock:
    """Starts at 0."""

    def __init__(self, beat_s: float) -> None:
        """`beat_s`: how far apart beats are meant to be."""
        self._beat_s = beat_s
        self.now_s = 0.0

    def beat(self, elapsed_s: float) -> None:
        """Time has passed since the last beat."""
        self.now_s += min(elapsed_s, _MAX_BEATS_CHARGED * self._beat_s)
