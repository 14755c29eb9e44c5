"""Logging of the gateway: one line a record on standard error, JSON unless a person is watching.

Every record has `timestamp` (ISO 8601, UTC), `level`, `logger` and `event`, and the `request_id` of the call
that is being handled, if there is one. Records of libraries (grpc, asyncio, warnings) take the same path.

What callers send stays out of the log: bytes, protobuf messages and lists are logged as their sizes, token
ids and texts not at all, and tracebacks carry no values of local variables. Control characters are escaped.

Logging never blocks: where nobody reads standard error, lines are dropped, counted, and their number told.
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
import sys
from array import array
from typing import TextIO

import structlog
from google.protobuf.message import Message
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from service.background_log import BackgroundLog
from service.printable import escaped

# Names under which contents of requests would appear, whatever their type.
_CONTENT_KEYS = frozenset({"token_id", "token_ids", "prompt", "text"})
_KEYS_OF_LINES = frozenset({"exception", "stack"})
_REQUEST_ID = "request_id"
# How long an end of the process waits for its log to be written.
_DRAIN_S = 1.0
_COMMON_KEYS = ("timestamp", "level", "logger", "event", _REQUEST_ID)


def configure_logging(level: str = "info", log_format: str = "auto", stream: TextIO | None = None) -> None:
    """Sends every log record of this process to `stream`, by default standard error.

    Replaces what was set before. `log_format` is "json", "pretty", or "auto", which is pretty on a terminal.
    """
    terminal = (stream or sys.stderr).isatty()
    pretty = log_format == "pretty" or (log_format == "auto" and terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
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
        cache_logger_on_first_use=False,  # or a second call of this function would not reach old loggers
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
    # At debug these two tell of every poll and every call, which hides our own records.
    for noisy in ("grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.INFO, root.level))
    logging.captureWarnings(True)


@functools.cache
def _background_log() -> BackgroundLog:
    """The one writer of this process to standard error."""
    log = BackgroundLog(
        sys.stderr.fileno(), lambda lines: get_logger(__name__).warning("log lines were dropped", lines=lines)
    )
    atexit.register(log.drain, _DRAIN_S)
    return log


def drain_log() -> None:
    """Waits a moment for what was logged to be written: before an end that asks nobody."""
    _background_log().drain(_DRAIN_S)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: `log = get_logger(__name__)`, then `log.info("worker_ready", worker_id=id)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def tells_details() -> bool:
    """Whether records of the level debug are logged. To ask costs little; to log one that is not, 8 us."""
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def bind_request_id(request_id: str) -> None:
    """Adds a request id to all further records of the current task.

    It needs no undoing: grpc.aio handles each call in a task of its own, whose context goes with it.
    """
    structlog.contextvars.bind_contextvars(**{_REQUEST_ID: request_id})


def current_request_id() -> str:
    """The request id bound in the current task, or an empty string."""
    return str(structlog.contextvars.get_contextvars().get(_REQUEST_ID, ""))


def redact_contents(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Processor: replaces values that can hold what a caller sent by their sizes."""
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
    # Both with plain tracebacks: structlog's others print local variables, which hold requests.
    if pretty:
        console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_escaped_traceback)
        return [_escape_controls, console]
    # JSON escapes controls by itself, and all that is not ASCII.
    return [structlog.processors.ExceptionRenderer(), _order_keys, structlog.processors.JSONRenderer()]


def _escape_controls(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Texts in one line that a terminal only shows. Others are shown by their repr, which escapes."""
    return {
        key: escaped(value, keep_lines=key in _KEYS_OF_LINES) if isinstance(value, str) else value
        for key, value in record.items()
    }


def _escaped_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write(escaped(text.getvalue(), keep_lines=True))


def _order_keys(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """What every line has comes first, so that lines can be read one below the other."""
    common = {key: record.pop(key) for key in _COMMON_KEYS if key in record}
    return {**common, **record}


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False for grpc's report, at ERROR with a traceback, that a client cancelled while it was written to."""
    error = record.exc_info[0] if record.exc_info else None
    name = error.__name__ if error is not None else ""
    return not (record.name.startswith("grpc") and name == "ExecuteBatchError")
