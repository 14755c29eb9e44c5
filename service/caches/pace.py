"""How fast operations complete: what a caller is told to wait when the queue is full."""

from __future__ import annotations


def sleep_s(wait_s: float) -> float:
    """When to come again after so long a wait, within what a client should sleep."""
    return min(max(wait_s, 0.05), 5.0)


class Pace:
    """How fast operations complete, to say how long a full queue will take."""

    def __init__(self) -> None:
        self._interval_s = 0.01
        self._last_s: float | None = None

    def completed(self, now_s: float) -> None:
        """Notes one completion."""
        if self._last_s is not None:
            # Idle time says nothing about speed.
            interval_s = min(now_s - self._last_s, 1.0)
            self._interval_s += 0.02 * (interval_s - self._interval_s)
        self._last_s = now_s

    def wait_s(self, queued: int) -> float:
        """How long `queued` operations take, within what a client should sleep."""
        return sleep_s(queued * self._interval_s)
