"""What the gateway logs, for tests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from workers.common.log import fields_of


@contextlib.contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """The records of the context, of any level, with their events and fields."""
    found: list[dict[str, Any]] = []
    logger, kept = logging.getLogger("service"), logging.Handler()
    kept.emit = lambda record: found.append(  # type: ignore[method-assign]
        {"event": record.getMessage(), "log_level": record.levelname.lower(), **fields_of(record)}
    )
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
