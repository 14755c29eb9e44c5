"""Tells of refused calls, but not of each of thousands: who floods the server must not fill its log."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.errors import QuireError
from service.logging import get_logger

_log = get_logger(__name__)
# Lines in any one second. What more there was is counted, and told with the next.
_MAX_PER_S = 50


class RefusalLog:
    """Owner of the count of what was not told."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._second_s = 0.0
        self._told = 0
        self._untold = 0

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        """A call was refused."""
        now_s = self._clock_s()
        if now_s - self._second_s >= 1:
            self._second_s, self._told = now_s, 0
        if self._told >= _MAX_PER_S:
            self._untold += 1
            return
        self._told += 1
        more = {"untold_before": self._untold} if self._untold else {}
        self._untold = 0
        _log.info(
            "call refused",
            rpc=rpc,
            code=failure.code,
            reason=failure.reason,
            message=failure.message,
            duration_ms=duration_ms,
            **more,
        )
