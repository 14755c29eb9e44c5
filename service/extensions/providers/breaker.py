"""A circuit breaker: stops requests to a provider that keeps failing. Pure: callers pass the time."""

from __future__ import annotations

import enum

from quire.v1 import runner_pb2


class Result(enum.Enum):
    """The result of a request, as far as it concerns the provider's health."""

    SUCCESS = enum.auto()
    FAILURE = enum.auto()
    # No information: a rate limit, a bad request, a cancelled call.
    NEUTRAL = enum.auto()


class Breaker:
    """Opens after `failures` failures in a row. After `open_s` it allows a probe, whose success closes it."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._threshold = failures
        self._open_s = open_s
        self._failures = 0
        # When the next probe may be sent. None: it is closed.
        self._open_until_s: float | None = None
        self._is_probing = False

    def begin(self, now_s: float) -> bool:
        """Whether a request may be sent now. If so, its end must be recorded."""
        if self._is_probing or self.left_s(now_s) > 0:
            return False
        self._is_probing = self._open_until_s is not None
        return True

    def response_started(self) -> None:
        """A response has begun. If it is the probe's, this closes the breaker: its rest may take long."""
        if self._is_probing:
            self._close()

    def record(self, result: Result, now_s: float) -> bool:
        """Records the end of a request, once for each that `begin` allowed. Returns whether this opens it."""
        if result is Result.SUCCESS:
            self._close()
        # Failures of requests that began before the breaker opened are ignored.
        elif result is Result.FAILURE and not self.left_s(now_s):
            self._failures += 1
            if self._failures >= self._threshold:
                self._is_probing, self._open_until_s = False, now_s + self._open_s
                return True
        # If it was a probe, the next request may be one at once.
        self._is_probing = False
        return False

    def left_s(self, now_s: float) -> float:
        """How long the breaker stays open. 0: a request may be sent."""
        return max(0.0, (self._open_until_s or now_s) - now_s)

    def state(self, now_s: float) -> runner_pb2.BreakerState:
        if self._open_until_s is None:
            return runner_pb2.BREAKER_STATE_CLOSED
        if self.left_s(now_s) > 0:
            return runner_pb2.BREAKER_STATE_OPEN
        return runner_pb2.BREAKER_STATE_HALF_OPEN

    def _close(self) -> None:
        self._open_until_s = None
        self._is_probing = False
        self._failures = 0
