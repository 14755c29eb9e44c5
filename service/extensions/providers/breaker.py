"""A circuit breaker: stops sending requests to a provider that keeps failing. Pure: callers pass the time."""

from __future__ import annotations

import enum

from quire.v1 import runner_pb2


class Result(enum.Enum):
    """What the end of a request says about the provider's health."""

    SUCCESS = enum.auto()
    FAILURE = enum.auto()
    # Says nothing: a rate limit, a bad request, a cancelled call.
    NEUTRAL = enum.auto()


class Breaker:
    """Opens after `failures` consecutive failures. After `open_s` it sends one probe, which closes it or not.

    The generation grows when it opens. Results of requests that began before are ignored.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._threshold = failures
        self._open_s = open_s
        self._failures = 0
        # When the next probe may be sent. None: it is closed.
        self._open_until_s: float | None = None
        self._is_probing = False
        self._generation = 0

    def begin(self, now_s: float) -> int | None:
        """The generation of a new request, whose end must be recorded. None: no request may be sent now."""
        if self._is_probing or self.left_s(now_s) > 0:
            return None
        if self._open_until_s is not None:
            self._is_probing = True
        return self._generation

    def response_started(self, generation: int) -> None:
        """The first bytes arrived. A probe closes the breaker now: its response may take long."""
        if generation == self._generation and self._is_probing:
            self._close()

    def record(self, generation: int, result: Result, now_s: float) -> bool:
        """Records the end of a request, once for each that `begin` allowed. Returns whether this opens it."""
        if generation != self._generation:
            return False
        if result is Result.SUCCESS:
            self._close()
        elif result is Result.NEUTRAL:
            # If it was a probe, the next request is a probe at once.
            self._is_probing = False
        else:
            self._failures += 1
            if self._is_probing or self._failures >= self._threshold:
                self._close()
                self._open_until_s = now_s + self._open_s
                self._generation += 1
                return True
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
