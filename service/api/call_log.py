"""Logs calls that have succeeded: all of them, or those that took long, with where their time went.

A Session, an Execute and other streams last as long as their callers use them, so they are never slow, but
the calls on a Session can be. What fails is in the refusal log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from service.api.refusal_log import BoundedLog
from service.config import Config
from service.logging import get_logger

_log = get_logger(__name__)


class CallLog:
    """Owner of two rate limits: that of slow calls, and that of all others."""

    def __init__(self, config: Config) -> None:
        self._slow_ms, self._slow = config.slow_call_ms, BoundedLog()
        # Debug records have no limit.
        debug = _log.debug if config.log_level == "debug" else None
        self._write = BoundedLog().write if config.log_calls == "all" else debug
        # How long the last commit of the journal took. A call is answered right after its own.
        self._commit_s = 0.0

    @classmethod
    def of(cls, config: Config) -> CallLog | None:
        """The log that the settings ask for, if any."""
        wanted = config.log_calls == "all" or config.slow_call_ms or config.log_level == "debug"
        return cls(config) if wanted else None

    def watching_commits(self, then: Callable[[float], None] | None) -> Callable[[float], None]:
        """Returns a callback for the time that a commit took, in seconds, which also calls `then`."""

        def note(took_s: float) -> None:
            self._commit_s = took_s
            if then is not None:
                then(took_s)

        return note

    def done(self, rpc: str, began_s: float, answer: Any) -> None:
        """A call has succeeded. `began_s` is of the monotonic clock; `answer`: None if it was a stream."""
        if answer is not None and self._slow_ms and self.slow(rpc, began_s, answer):
            return
        if self._write is not None:
            self._write("call done", rpc=rpc, code="OK", duration_ms=elapsed_ms(began_s))

    def slow(self, rpc: str, began_s: float, answer: Any) -> bool:
        """A call has succeeded, which is logged if it was slow. Returns whether it was."""
        duration_ms = elapsed_ms(began_s)
        if duration_ms <= self._slow_ms:
            return False
        times = self._where_time_went(answer)
        self._slow.write("slow call", rpc=rpc, code="OK", duration_ms=duration_ms, **times)
        return True

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
