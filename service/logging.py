"""Logging of the gateway: see `workers.common.log`. A line of a call has its `request_id` and `trace_id`."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TextIO

from workers.common import log
from workers.common.log import get_logger

# How long the process waits at its end until the log is written.
_DRAIN_S = 1.0
_RARE_S = 10.0


def configure_logging(
    level: str = "info",
    log_format: str = "auto",
    stream: TextIO | None = None,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Sends every log record of this process to `stream`, by default standard error.

    Replaces an earlier configuration. `fields`: what each record has. `log_format`: see `log.configure`.
    """
    handler = log.configure("", level, log_format, lambda: {**_ids(), **(fields or {})}, stream)
    handler.addFilter(_is_worth_logging)
    if stream is None:
        atexit.register(drain_log)
    # At debug level these two log every poll and every call, which would hide the gateway's own records.
    for noisy in ("grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.INFO, logging.getLogger().level))
    logging.captureWarnings(True)


def drain_log() -> None:
    """Waits up to a second until the log is written. For an exit that skips atexit handlers."""
    log.standard_error().drain(_DRAIN_S)


class RareWarnings:
    """Logs failures that repeat with each attempt: one in ten seconds. `values`: of each line."""

    def __init__(self, name: str, **values: object) -> None:
        self._log, self._values, self._next_s = get_logger(name), values, 0.0

    def __call__(self, event: str, error: BaseException | None = None) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _RARE_S
            self._log.warning(event, error=None if error is None else str(error), **self._values)


# It is never reset: grpc.aio handles each call in its own task, with its own context.
_request_id: ContextVar[str] = ContextVar("request_id", default="")
# Adds a request id to all further records of the current task.
bind_request_id: Callable[[str], object] = _request_id.set
# The request id of the current task, or an empty string.
current_request_id: Callable[[], str] = _request_id.get
# The same for the id of the trace that the call belongs to: 32 hexadecimal digits.
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")
bind_trace_id: Callable[[str], object] = _trace_id.set


def _ids() -> dict[str, object]:
    found = {"request_id": _request_id.get(), "trace_id": _trace_id.get()}
    return {key: value for key, value in found.items() if value}


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for grpc's error, with a traceback, that a client cancelled a call during a write."""
    error = record.exc_info[0] if record.exc_info else None
    name = error.__name__ if error is not None else ""
    return not (record.name.startswith("grpc") and name == "ExecuteBatchError")
