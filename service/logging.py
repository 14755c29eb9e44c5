"""Logging of the gateway: one line per record on standard error, as JSON unless it is a terminal.

Every record has `timestamp` (ISO 8601, UTC), `level`, `logger` and `event`, and the `request_id` and the
`trace_id` of the current call, if it has them. Records of libraries (grpc, asyncio, warnings) are logged in
the same way.

The log has no contents of requests: bytes, protobuf messages and lists are logged as their sizes, token ids
and texts not at all, and tracebacks have no values of local variables. Control characters are escaped.

Logging never blocks: if standard error is not read, lines are dropped, and their number is logged later.
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TextIO

import structlog
from google.protobuf.message import Message
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from service.printable import escaped
from workers.common.background_log import BackgroundLog

# Keys whose values are contents of requests, whatever their type.
_CONTENT_KEYS = frozenset({"token_id", "token_ids", "prompt", "text"})
_KEYS_OF_LINES = frozenset({"exception", "stack"})
_REQUEST_ID, _TRACE_ID = "request_id", "trace_id"
# How long the process waits at its end until the log is written.
_DRAIN_S = 1.0
_RARE_S = 10.0
_COMMON_KEYS = ("timestamp", "level", "logger", "event", _REQUEST_ID, _TRACE_ID)


def configure_logging(
    level: str = "info",
    log_format: str = "auto",
    stream: TextIO | None = None,
    fields: Mapping[str, object] | None = None,
) -> None:
    """Sends every log record of this process to `stream`, by default standard error.

    Replaces an earlier configuration. `log_format` is "json", "pretty", or "auto": pretty on a terminal.
    `fields`: what each record has.
    """
    terminal = (stream or sys.stderr).isatty()
    pretty = log_format == "pretty" or (log_format == "auto" and terminal)
    shared: list[Processor] = [
        lambda _logger, _method, record: {**record, **(fields or {})},
        _add_ids,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact_contents,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # so that a second call of this function applies to old loggers
    )
    handler = logging.StreamHandler(stream if stream is not None else _background_log())
    handler.addFilter(_is_worth_logging)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(pretty=pretty, colors=terminal),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At debug level these two log every poll and every call, which would hide the gateway's own records.
    for noisy in ("grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.INFO, root.level))
    logging.captureWarnings(True)


@functools.cache
def _background_log() -> BackgroundLog:
    """The only writer of this process to standard error."""
    log = BackgroundLog(
        sys.stderr.fileno(), lambda lines: get_logger(__name__).warning("log lines were dropped", lines=lines)
    )
    atexit.register(log.drain, _DRAIN_S)
    return log


def drain_log() -> None:
    """Waits up to a second until the log is written. For an exit that skips atexit handlers."""
    _background_log().drain(_DRAIN_S)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: `log = get_logger(__name__)`, then `log.info("worker_ready", worker_id=id)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


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


def _add_ids(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    for key, value in ((_REQUEST_ID, _request_id.get()), (_TRACE_ID, _trace_id.get())):
        if value:
            record.setdefault(key, value)
    return record


def redact_contents(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Processor: replaces values that may have contents of requests by their sizes."""
    for key, value in record.items():
        if key.startswith("_"):  # structlog's own
            continue
        if key in _CONTENT_KEYS:
            record[key] = "[redacted]"
        elif isinstance(value, Message):
            record[key] = f"[{value.DESCRIPTOR.name} of {value.ByteSize()} bytes]"
        elif isinstance(value, bytes | bytearray | memoryview):
            record[key] = f"[{len(value)} bytes]"
        elif isinstance(value, list | tuple | set | array) and not all(
            isinstance(item, str) for item in value
        ):
            record[key] = f"[{len(value)} items]"
    return record


def _renderers(*, pretty: bool, colors: bool) -> list[Processor]:
    # Both use plain tracebacks: structlog's default prints local variables, which have contents of requests.
    if pretty:
        console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_escaped_traceback)
        return [_escape_controls, console]
    # JSON escapes control characters, and all that is not ASCII.
    return [structlog.processors.ExceptionRenderer(), _order_keys, structlog.processors.JSONRenderer()]


def _escape_controls(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Processor: escapes control characters in texts. Other values are shown by repr, which escapes."""
    return {
        key: escaped(value, keep_lines=key in _KEYS_OF_LINES) if isinstance(value, str) else value
        for key, value in record.items()
    }


def _escaped_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write(escaped(text.getvalue(), keep_lines=True))


def _order_keys(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Processor: puts the keys that every line has first, so that lines are easy to compare."""
    common = {key: record.pop(key) for key in _COMMON_KEYS if key in record}
    return {**common, **record}


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for grpc's error, with a traceback, that a client cancelled a call during a write."""
    error = record.exc_info[0] if record.exc_info else None
    name = error.__name__ if error is not None else ""
    return not (record.name.startswith("grpc") and name == "ExecuteBatchError")
