"""The log of a worker's processes: one line a record on standard error, which gateway and workers share.

Made with the standard library, because images for GPUs lack structlog, with which the gateway writes the same
lines. A record has `timestamp`, `level`, `logger`, `event`, whose it is, and fields. Modules that have none
use `logging` itself. Tracebacks have no values of local variables, which contain callers' tokens.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import logging
import sys
from collections.abc import Mapping
from typing import Final

from workers.common.background_log import BackgroundLog

_FIELDS: Final = "quire_fields"
_COLORS = {"debug": 34, "info": 32, "warning": 33, "error": 31, "critical": 31}


class Log:
    """Logs events with fields: `log.info("waiting for a gateway", listen=address)`."""

    def __init__(self, name: str) -> None:
        """`name`: "workers", or a module of it."""
        self._logger = logging.getLogger(name)

    def log(self, level: int, event: str, **fields: object) -> None:
        self._write(level, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, exc_info: BaseException | None = None, **fields: object) -> None:
        """At level error, with the traceback of an exception."""
        self._write(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, **fields: object) -> None:
        """At level error, with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, fields, sys.exc_info()[1])

    def _write(
        self, level: int, event: str, fields: Mapping[str, object], error: BaseException | None = None
    ) -> None:
        self._logger.log(level, event, exc_info=error, extra={_FIELDS: fields})


get_logger = functools.cache(Log)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that a record was logged with."""
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


class _Lines(logging.Formatter):
    """A record as one line, or with a traceback as several if they are for people."""

    def __init__(self, origin: Mapping[str, object], *, pretty: bool, colors: bool) -> None:
        super().__init__()
        self._origin, self._pretty, self._colors = origin, pretty, colors

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created, dt.UTC)
        timestamp = when.isoformat(timespec="microseconds").replace("+00:00", "Z")
        level, event = record.levelname.lower(), record.getMessage()
        fields = {**self._origin, **fields_of(record)}
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        if not self._pretty:
            line = {"timestamp": timestamp, "level": level, "logger": record.name, "event": event, **fields}
            return json.dumps(line | ({"exception": trace} if trace else {}), default=repr)
        shown = " ".join(f"{key}={_printable(value, alone=False)}" for key, value in fields.items())
        name = f"{level:<9}"  # as wide as those of the gateway, whose lines stand beside them
        if self._colors:
            name = f"\x1b[{_COLORS.get(level, 0)}m{name}\x1b[0m"
        line_text = f"{timestamp} [{name}] {_printable(event):<30} [{record.name}] {shown}"
        return line_text + (f"\n{trace}" if trace else "")


def _printable(value: object, *, alone: bool = True) -> str:
    """Without control characters; not `alone`: among others, so that it has to show where it ends."""
    text = value if isinstance(value, str) else repr(value)
    return text if text.isprintable() and (alone or " " not in text) else repr(value)


class _ToStandardError(logging.Handler):
    """Writes each record at once: others write to the same pipe."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            background_log().write(line + "\n")


def configure(level: str, log_format: str, origin: Mapping[str, object]) -> None:
    """Write the lines of `workers` to standard error.

    Args:
        level: The name of the lowest level that is written, such as "info".
        log_format: "json", "pretty", or "auto": pretty on a terminal.
        origin: Fields of all lines.
    """
    is_terminal = sys.stderr.isatty()
    pretty = log_format == "pretty" or (log_format == "auto" and is_terminal)
    handler = _ToStandardError()
    handler.setFormatter(_Lines(origin, pretty=pretty, colors=is_terminal))
    log = logging.getLogger("workers")
    log.setLevel(level.upper())
    log.handlers[:] = [handler]
    # A library may give the root a handler: then lines would be there twice.
    log.propagate = False


@functools.cache
def background_log() -> BackgroundLog:
    """The one writer of this process to standard error."""
    log = get_logger("workers")
    return BackgroundLog(
        sys.stderr.fileno(), lambda lines: log.warning("log lines were dropped", lines=lines)
    )
