"""Logs calls: those that failed, were cancelled or took long, or all of them; and counts refusals.

Each kind of line has a rate limit, so that a flood does not fill the log. A Session, an Execute and other
streams last as long as their callers use them, so they are never slow, but the calls on a Session can be.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from service.config import Config
from service.errors import QuireError
from service.logging import get_logger

_log = get_logger(__name__)
# Lines per second.
_MAX_PER_S = 50


class _BoundedLog:
    """Log lines with a rate limit. Those beyond it are counted, and the next line has their number."""

    def __init__(self) -> None:
        self._second_s = 0.0
        self._lines = 0
        self._suppressed = 0

    def write(self, event: str, **values: object) -> None:
        """Writes a line, or counts it."""
        now_s = time.monotonic()
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


class CallLog:
    """Owner of the rate limits: of calls that failed or were cancelled, of slow ones, and of all others."""

    def __init__(self, config: Config) -> None:
        # By reason, whatever is logged.
        self.refusals: Counter[str] = Counter()
        self._failed = _BoundedLog().write if config.log_calls != "off" else None
        self._slow_ms, self._slow = config.slow_call_ms, _BoundedLog().write
        # Debug records have no limit.
        debug = _log.debug if config.log_level == "debug" else None
        self._done = _BoundedLog().write if config.log_calls == "all" else debug
        # Whether calls that succeed can have a line.
        self.has_successes = bool(self._slow_ms or self._done is not None)
        # How long the last commit of the journal took. A call is answered right after its own.
        self._commit_s = 0.0

    def refused(self, rpc: str, failure: QuireError, duration_ms: float) -> None:
        """Counts and logs a refused call."""
        self.count(failure)
        if self._failed is not None:
            self._failed(
                "call refused",
                rpc=rpc,
                code=failure.code,
                reason=failure.reason,
                message=failure.message,
                duration_ms=duration_ms,
            )

    def count(self, failure: QuireError) -> None:
        """Counts a refusal without a log line: a call of a Session, whose stream continues."""
        self.refusals[failure.reason] += 1

    def cancelled(self, rpc: str, duration_ms: float) -> None:
        """Logs a call that its caller cancelled."""
        if self._failed is not None:
            self._failed("call cancelled", rpc=rpc, code="CANCELLED", duration_ms=duration_ms)

    def done(self, rpc: str, began_s: float, answer: Any) -> None:
        """A call has succeeded. `began_s` is of the monotonic clock; `answer`: None if it was a stream."""
        if answer is not None and self._slow_ms and self.slow(rpc, began_s, answer):
            return
        if self._done is not None:
            self._done("call done", rpc=rpc, code="OK", duration_ms=elapsed_ms(began_s))

    def slow(self, rpc: str, began_s: float, answer: Any) -> bool:
        """A call has succeeded, which is logged if it was slow. Returns whether it was."""
        duration_ms = elapsed_ms(began_s)
        if duration_ms <= self._slow_ms:
            return False
        times = self._where_time_went(answer)
        self._slow("slow call", rpc=rpc, code="OK", duration_ms=duration_ms, **times)
        return True

    def committed(self, took_s: float) -> None:
        """The journal has committed something, which took so long."""
        self._commit_s = took_s

    def _where_time_went(self, answer: Any) -> dict[str, float]:
        """What is known of an append, in ms; of a batch, of the item that took its worker longest."""
        answers: list[Any] = [getattr(one, "response", None) for one in getattr(answer, "results", ())] or [
            answer
        ]
        timings = [one.timing for one in answers if hasattr(one, "timing")]
        if not timings:
            return {}
        timing = max(timings, key=lambda one: one.queue_ns + one.compute_ns)
        return {
            "queue_ms": timing.queue_ns / 1e6,
            "compute_ms": timing.compute_ns / 1e6,
            "steps": timing.steps,
            "batch_items": timing.batch_items,
            "commit_ms": round(self._commit_s * 1000, 3),
        }


def elapsed_ms(began_s: float) -> float:
    """The time since then on the monotonic clock, rounded for the log."""
    return round((time.monotonic() - began_s) * 1000, 3)
