"""Small files that have to outlive a crash of the system."""

from __future__ import annotations

import os
from pathlib import Path

from service.logging import get_logger

_log = get_logger(__name__)


def write(path: Path, text: str) -> None:
    """Replaces a file as a whole. Blocks on the disk. Raises OSError: nothing has changed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # First: once the new file is in its place nothing can be taken back any more.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        try:
            os.fsync(directory)
        except OSError as error:
            # It is there; only a crash of the system could undo it.
            _log.warning("the directory cannot be synced", path=str(path), error=error.strerror)
    finally:
        os.close(directory)
