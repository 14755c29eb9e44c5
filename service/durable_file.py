"""Small files that survive a crash of the system."""

from __future__ import annotations

import os
from pathlib import Path

from service.logging import get_logger
from workers.common.trusted import make_private

_log = get_logger(__name__)


def write(path: Path, text: str, *, sync: bool = True) -> None:
    """Replaces a private file atomically. Blocks on the disk. Raises OSError if nothing was changed.

    Without `sync` it does not wait for the disk, so a crash of the system may undo it.
    """
    make_private(path.parent)
    # Opened first, because a failure after the replacement could not undo it.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
        try:
            if sync:
                os.fsync(directory)
        except OSError as error:
            # The file is replaced. Only a crash of the system could undo it.
            _log.warning("the directory cannot be synced", path=str(path), error=error.strerror)
    finally:
        os.close(directory)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, survive a crash of the system. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
