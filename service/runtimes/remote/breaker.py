"""Leaves a provider alone that fails again and again. Pure: the time is given."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quire.v1 import runner_pb2


class Outcome(enum.Enum):
    """How a request ended, as far as it says something of the provider's health."""

    SUCCESS = enum.auto()
    FAILURE = enum.auto()
    # It says nothing: a rate limit, a bad request, a caller who went.
    NEITHER = enum.auto()


class _State(enum.Enum):
    CLOSED = enum.auto()
    OPEN = enum.auto()
    PROBING = enum.auto()


@dataclass(frozen=True, slots=True)
class Pass:
    """Allows one request. What is said of one from before the last change of state does not count."""

    era: int


class Breaker:
    """Opens after `failures` of them in a row; after `open_s`, one request tries whether it may close."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._threshold = failures
        self._open_s = open_s
        self._state = _State.CLOSED
        self._failures = 0
        self._tries_from_s = 0.0
        self._era = 0

    def begin(self, now_s: float) -> Pass | None:
        """A request is to be sent, whose end has to be recorded. None: it must not be."""
        if self._state is _State.PROBING or self.left_s(now_s) > 0:
            return None
        if self._state is _State.OPEN:
            self._change(_State.PROBING)
        return Pass(self._era)

    def answered(self, own: Pass) -> None:
        """The answer has begun: others need not wait for the end of a probe's."""
        if own.era == self._era and self._state is _State.PROBING:
            self._state = _State.CLOSED
            self._failures = 0

    def record(self, own: Pass, outcome: Outcome, now_s: float) -> None:
        """A request has ended. To be called once for each pass."""
        if own.era != self._era:
            return
        was_probe = self._state is _State.PROBING
        if outcome is Outcome.SUCCESS:
            self._state = _State.CLOSED
            self._failures = 0
        elif outcome is Outcome.FAILURE:
            self._failures += 1
            if was_probe or self._failures >= self._threshold:
                self._tries_from_s = now_s + self._open_s
                self._change(_State.OPEN)
        elif was_probe:
            # Another one may try at once.
            self._change(_State.OPEN)

    def left_s(self, now_s: float) -> float:
        """How long nothing will be sent. 0: something may be."""
        return max(0.0, self._tries_from_s - now_s) if self._state is _State.OPEN else 0.0

    def state(self, now_s: float) -> runner_pb2.BreakerState:
        """As callers see it."""
        if self._state is _State.CLOSED:
            return runner_pb2.BREAKER_STATE_CLOSED
        if self.left_s(now_s) > 0:
            return runner_pb2.BREAKER_STATE_OPEN
        return runner_pb2.BREAKER_STATE_HALF_OPEN

    def _change(self, state: _State) -> None:
        self._state = state
        self._failures = 0
        self._era += 1
