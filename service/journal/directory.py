"""The lock of a data directory, and translation of file errors to messages for the operator."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from service.journal.base import JournalUnusable
from workers.common.trusted import make_private

# The lock file: locked while a gateway uses the directory. Contains its pid.
LOCK: Final = "lock"


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turns OSError into JournalUnusable."""
    try:
        yield
    except OSError as error:
        advice = "Make sure that it can be written to, and that the disk has room and works."
        if isinstance(error, FileExistsError | NotADirectoryError):
            advice = "It must be a directory, but is a file: choose another one with --data-dir."
        named = error.filename2 or error.filename or path  # filename2: the target of a copy
        raise JournalUnusable(f"{named}: {error.strerror}. {advice}") from error


def lock(directory: Path) -> int:
    """Locks a data directory until the returned descriptor is closed. Creates a missing one.

    Raises JournalUnusable, also for another user's directory: its lock could be a link to any file, and the
    lock is written to.
    """
    path = directory / LOCK
    with translate_errors(directory):
        make_private(directory)
        locked = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(locked, 0)
            os.pwrite(locked, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(locked, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(locked)
            raise _in_use(directory, f", process {holder}") from None
        except BaseException:
            os.close(locked)
            raise
    return locked


def lock_itself(directory: Path) -> int:
    """Locks a directory itself until the returned descriptor is closed. Raises JournalUnusable, OSError.

    Unlike a lock file, it cannot be removed while it is in use. Some network file systems cannot lock it.
    """
    locked = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(locked)
        raise _in_use(directory, ", whose lock was removed") from None
    except OSError:
        return locked
    return locked


def _in_use(directory: Path, holder: str) -> JournalUnusable:
    return JournalUnusable(
        f"{directory} is in use by another gateway{holder}. End it, or choose another directory."
    )
