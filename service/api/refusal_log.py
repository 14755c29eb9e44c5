"""Logs calls that failed or were cancelled, with a rate limit so that a flood does not fill the log.

Calls that are not logged are counted. The next line has their number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from service.errors import QuireError
from service.logging import get_logger

_log = get_logger(__name__)
# Lines per second.
_MAX_PER_S = 50


class RefusalLog:
    """Owner of the counts: calls that were not logged, and all refusals by reason."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._second_s = 0.0
        self._lines = 0
        self._suppressed = 0
        self.by_reason: Counter[str] = Counter()

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        """Counts and logs a refused call."""
        self.count(failure)
        self._write(
            "call refused",
            rpc=rpc,
            code=failure.code,
            reason=failure.reason,
            message=failure.message,
            duration_ms=duration_ms,
        )

    def count(self, failure: QuireError) -> None:
        """Counts a refusal without a log line: a call of a Session, whose stream continues."""
        self.by_reason[failure.reason] += 1

    def cancelled(self, rpc: str, duration_ms: float) -> None:
        """Logs a call that its caller cancelled."""
        self._write("call cancelled", rpc=rpc, duration_ms=duration_ms)

    def _write(self, event: str, **values: object) -> None:
        now_s = self._clock_s()
        if now_s - self._second_s >= 1:
            self._second_s, self._lines = now_s, 0
        if self._lines >= _MAX_PER_S:
            self._suppressed += 1
            return
        self._lines += 1
        if self._suppressed:
            values["untold_before"] = self._suppressed
            self._suppressed = 0
        _log.info(event, **values)
