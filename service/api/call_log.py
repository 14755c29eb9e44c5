"""Logs calls that failed or were cancelled, and at level debug all others. Counts refusals.

Log lines of failures have a rate limit, so that a flood does not fill the log.
"""

from __future__ import annotations

import time
from collections import Counter

from service.config import Config
from service.errors import QuireError
from service.logging import get_logger

_log = get_logger(__name__)
# Lines per second.
_MAX_PER_S = 50


class CallLog:
    """Owner of the rate limit. Suppressed lines are counted, and the next line has their number."""

    def __init__(self, config: Config) -> None:
        # The number of refusals by reason.
        self.refusals: Counter[str] = Counter()
        # Whether calls that succeed are logged.
        self.has_successes = config.log_level == "debug"
        self._second_s = 0.0
        self._lines = 0
        self._suppressed = 0

    def _failed(self, event: str, **values: object) -> None:
        """Writes a log line, or counts it as suppressed."""
        now_s = time.monotonic()
        if now_s - self._second_s >= 1:
            self._second_s, self._lines = now_s, 0
        if self._lines >= _MAX_PER_S:
            self._suppressed += 1
            return
        self._lines += 1
        if self._suppressed:
            values["suppressed_lines"] = self._suppressed
            self._suppressed = 0
        _log.info(event, **values)

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        self.count(failure)
        self._failed(
            "call refused",
            rpc=rpc,
            code=failure.code,
            reason=failure.reason,
            message=failure.message,
            duration_ms=duration_ms,
        )

    def count(self, failure: QuireError) -> None:
        """Counts a refusal without a log line. For calls of a Session, whose stream continues."""
        self.refusals[failure.reason] += 1

    def cancelled(self, rpc: str, duration_ms: float) -> None:
        self._failed("call cancelled", rpc=rpc, code="CANCELLED", duration_ms=duration_ms)

    def done(self, rpc: str, began_s: float) -> None:
        """Logs a call that succeeded. `began_s`: on the monotonic clock."""
        _log.debug("call done", rpc=rpc, code="OK", duration_ms=elapsed_ms(began_s))


def elapsed_ms(began_s: float) -> float:
    """The time since `began_s` on the monotonic clock in milliseconds, rounded for the log."""
    return round((time.monotonic() - began_s) * 1000, 3)
