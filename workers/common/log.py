"""Log records with fields, each a line on standard error: as JSON, or for people on a terminal.

With the standard library alone, as images for GPUs lack others. Every line has `timestamp` (ISO 8601, UTC),
`level`, `logger` and `event`; then what the process or the call adds, and the fields of the record. Records
of libraries are lines of the same kind.

No line has contents of requests: bytes, protobuf messages and lists are written as their sizes, token ids and
texts not at all, and tracebacks have no values of local variables. Control characters are escaped. Logging
never blocks: see `background_log`.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import logging
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Final, TextIO

from google.protobuf.message import Message

from workers.common.background_log import BackgroundLog

_FIELDS: Final = "quire_fields"
# Whose values are contents of requests, whatever their type.
_CONTENTS = frozenset({"token_id", "token_ids", "prompt", "text"})
_COLORS = {"debug": 34, "info": 32, "warning": 33, "error": 31, "critical": 31}


class Log:
    """Logs events with fields: `log.info("worker ready", worker_id=name)`."""

    def __init__(self, name: str, fields: Mapping[str, object] | None = None) -> None:
        """`name`: of a module. `fields`: of all its records."""
        self._logger, self._fields = logging.getLogger(name), fields or {}

    def bind(self, **fields: object) -> Log:
        """The same with further fields in each record."""
        return Log(self._logger.name, {**self._fields, **fields})

    def log(self, level: int, event: str, exc_info: BaseException | None = None, **fields: object) -> None:
        """At a level of `logging`, with the traceback of an exception."""
        if self._logger.isEnabledFor(level):
            extra = {_FIELDS: _redacted({**self._fields, **fields})}
            self._logger.log(level, event, exc_info=exc_info, extra=extra)

    # At the level that each is named after.
    debug = functools.partialmethod(log, logging.DEBUG)
    info = functools.partialmethod(log, logging.INFO)
    warning = functools.partialmethod(log, logging.WARNING)
    error = functools.partialmethod(log, logging.ERROR)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the exception that is being handled."""
        self.log(logging.ERROR, event, sys.exc_info()[1], **fields)


get_logger = functools.cache(Log)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that a record was logged with."""
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


def _redacted(fields: Mapping[str, object]) -> dict[str, object]:
    return {key: "[redacted]" if key in _CONTENTS else _shown(value) for key, value in fields.items()}


def _shown(value: object) -> object:
    """A value, or its size if it may have contents of requests."""
    match value:
        case Message():
            return f"[{value.DESCRIPTOR.name} of {value.ByteSize()} bytes]"
        case bytes() | bytearray() | memoryview():
            return f"[{len(value)} bytes]"
        case list() | tuple() | set() | array() if not all(isinstance(item, str) for item in value):
            return f"[{len(value)} items]"
    return value


class _Lines(logging.Formatter):
    """A record as one line, or with a traceback as several if they are for people."""

    def __init__(self, added: Callable[[], Mapping[str, object]], *, pretty: bool, colors: bool) -> None:
        super().__init__()
        self._added, self._pretty, self._colors = added, pretty, colors

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created, dt.UTC)
        timestamp = when.isoformat(timespec="microseconds").replace("+00:00", "Z")
        level, event = record.levelname.lower(), record.getMessage()
        fields = {**self._added(), **fields_of(record)}
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        if not self._pretty:
            line = {"timestamp": timestamp, "level": level, "logger": record.name, "event": event, **fields}
            return json.dumps(line | ({"exception": trace} if trace else {}), default=repr)
        shown = " ".join(f"{key}={_printable(value, alone=False)}" for key, value in fields.items())
        name = f"{level:<8}"
        if self._colors:
            name = f"\x1b[{_COLORS.get(level, 0)}m{name}\x1b[0m"
        line_text = f"{timestamp} [{name}] {_printable(event):<30} [{record.name}] {shown}"
        return line_text + (f"\n{_escaped_lines(trace)}" if trace else "")


def _printable(value: object, *, alone: bool = True) -> str:
    """Without control characters; not `alone`: among others, so that it has to show where it ends."""
    text = value if isinstance(value, str) else repr(value)
    return text if text.isprintable() and (alone or " " not in text) else repr(value)


def _escaped_lines(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def configure(
    name: str,
    level: str,
    log_format: str,
    added: Callable[[], Mapping[str, object]],
    stream: TextIO | None = None,
) -> logging.Handler:
    """Writes the records of a logger, and of those below it, as lines. Returns what replaces its handlers.

    Args:
        name: Empty: all records of the process.
        level: The lowest that is written, such as "info".
        log_format: "json", "pretty", or "auto": pretty on a terminal.
        added: Returns fields of each line, when it is written.
        stream: Where; by default standard error.
    """
    is_terminal = (stream or sys.stderr).isatty()
    pretty = log_format == "pretty" or (log_format == "auto" and is_terminal)
    handler = logging.StreamHandler(standard_error() if stream is None else stream)
    handler.setFormatter(_Lines(added, pretty=pretty, colors=is_terminal))
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    # A library may give the root a handler: then lines would be there twice.
    logger.propagate = False
    return handler


@functools.cache
def standard_error() -> BackgroundLog:
    """The one writer of this process to standard error."""
    log = get_logger(__name__)
    return BackgroundLog(
        sys.stderr.fileno(), lambda lines: log.warning("log lines were dropped", lines=lines)
    )
