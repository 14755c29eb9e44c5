"""Tells of calls that came to nothing, but not of each of thousands: no flood is to fill the log.

What is not told is counted, and told with the next line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from service.errors import QuireError
from service.logging import get_logger

_log = get_logger(__name__)
# Lines in any one second.
_MAX_PER_S = 50


class RefusalLog:
    """Owner of the counts: of what was not told, and of all refusals, by reason."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._second_s = 0.0
        self._told = 0
        self._untold = 0
        self.by_reason: Counter[str] = Counter()

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        """A call was refused."""
        self.count(failure)
        self._tell(
            "call refused",
            rpc=rpc,
            code=failure.code,
            reason=failure.reason,
            message=failure.message,
            duration_ms=duration_ms,
        )

    def count(self, failure: QuireError) -> None:
        """A call was refused, and is not told: one of a Session has its answer on a stream that goes on."""
        self.by_reason[failure.reason] += 1

    def cancelled(self, rpc: str, duration_ms: float) -> None:
        """A caller gave up."""
        self._tell("call cancelled", rpc=rpc, duration_ms=duration_ms)

    def _tell(self, event: str, **values: object) -> None:
        now_s = self._clock_s()
        if now_s - self._second_s >= 1:
            self._second_s, self._told = now_s, 0
        if self._told >= _MAX_PER_S:
            self._untold += 1
            return
        self._told += 1
        if self._untold:
            values["untold_before"] = self._untold
            self._untold = 0
        _log.info(event, **values)
