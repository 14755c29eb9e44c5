"""The log of this process."""

from __future__ import annotations

import functools
import sys

import structlog

from workers.common.background_log import BackgroundLog


@functools.cache
def background_log() -> BackgroundLog:
    """The one writer of this process to standard error."""
    log = structlog.get_logger("workers")
    return BackgroundLog(
        sys.stderr.fileno(), lambda lines: log.warning("log lines were dropped", lines=lines)
    )
