"""A token bucket for rate limits. Pure: the caller passes the time."""

from __future__ import annotations

import math

# A missing amount below this fraction of the capacity is a rounding error.
_ROUNDING = 1e-9


class TokenBucket:
    """Holds up to `capacity`, starts full, and refills at `per_s`. Both may be changed.

    An estimate can be corrected later by taking more or less, so the level may be below 0.
    """

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._level = capacity
        self._at_s = -math.inf

    def wait_s(self, amount: float, now_s: float) -> float:
        """The time until `amount` can be taken. More than the capacity can be taken from a full bucket."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return 0.0 if missing <= self.capacity * _ROUNDING else missing / self.per_s

    def take(self, amount: float, now_s: float) -> None:
        """Takes `amount`, whatever the level. A negative amount is put back."""
        self._level = min(self.capacity, self.level(now_s) - amount)

    def level(self, now_s: float) -> float:
        """The level now. A time before that of an earlier call does not refill."""
        if now_s > self._at_s:
            self._level = min(self.capacity, self._level + (now_s - self._at_s) * self.per_s)
            self._at_s = now_s
        return self._level
