"""Which requests take too long to arrive, and which of those that are slow are too many.

gRPC holds what has arrived of a message until the rest is there, and does not say how much that is. So a
request that is still arriving after a second counts as the largest there may be, and as many may be slow as
the budget has room for. The newest are given up first: whoever sends much does not push out those before.

Pure: no clock, no I/O. Time is that of a RunningClock.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar

from service.errors import ArrivingFull, MessageTimeout, QuireError
from service.running_clock import RunningClock

BEAT_S = 0.25
# What arrives sooner is no reason to count: any number of callers may begin at the same moment.
_SLOW_S = 1.0
_Call = TypeVar("_Call", bound=Hashable)


class Arrivals(Generic[_Call]):
    """Owner of the calls whose request has not arrived."""

    def __init__(self, max_bytes: int, max_request_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        # One alone always has room, however large.
        self._max_slow = max(1, max_bytes // max_request_bytes)
        self._timeout_s = timeout_s
        self._clock = RunningClock(BEAT_S)
        # When each began, the oldest first.
        self._began_s: dict[_Call, float] = {}

    def __len__(self) -> int:
        return len(self._began_s)

    def begin(self, call: _Call) -> None:
        """Its request is awaited."""
        # The beat that it comes in is not charged: it may be all but over.
        self._began_s[call] = self._clock.now_s + BEAT_S

    def end(self, call: _Call) -> None:
        """Its request is there, or nobody waits for it any more."""
        self._began_s.pop(call, None)

    def beat(self, elapsed_s: float) -> list[tuple[_Call, QuireError]]:
        """Time has passed since the last beat. The calls to give up now, and why; they are forgotten here."""
        self._clock.beat(elapsed_s)
        late = self._older_than(self._timeout_s)
        slow = self._older_than(_SLOW_S - BEAT_S)[len(late) :]
        given_up: list[tuple[_Call, QuireError]] = [(call, MessageTimeout(self._timeout_s)) for call in late]
        given_up += [(call, ArrivingFull(self._max_bytes)) for call in slow[self._max_slow :]]
        for call, _ in given_up:
            del self._began_s[call]
        return given_up

    def _older_than(self, age_s: float) -> list[_Call]:
        limit_s = self._clock.now_s - age_s
        return [call for call, _ in takewhile(lambda item: item[1] < limit_s, self._began_s.items())]
