"""Logs calls that failed or were cancelled, with a rate limit so that a flood does not fill the log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from service.errors import QuireError
from service.logging import get_logger

# All lines about calls have the same logger, whether the calls failed.
_log = get_logger("service.api.call_log")
# Lines per second.
_MAX_PER_S = 50


class BoundedLog:
    """Log lines with a rate limit. Those beyond it are counted, and the next line has their number."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._second_s = 0.0
        self._lines = 0
        self._suppressed = 0

    def write(self, event: str, **values: object) -> None:
        """Writes a line, or counts it."""
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


class RefusalLog:
    """Owner of the counts of all refusals by reason."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, *, is_logging: bool = True) -> None:
        """`is_logging`: otherwise calls are only counted."""
        self._lines = BoundedLog(clock_s) if is_logging else None
        self.by_reason: Counter[str] = Counter()

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        """Counts and logs a refused call."""
        self.count(failure)
        if self._lines is not None:
            self._lines.write(
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
        if self._lines is not None:
            self._lines.write("call cancelled", rpc=rpc, code="CANCELLED", duration_ms=duration_ms)
