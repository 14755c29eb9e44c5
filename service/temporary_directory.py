"""Directories of servers that keep nothing, in the system's temporary directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from workers.common.trusted import require_trusted

_PREFIX: Final = "quire-server-"


class TemporaryDirectory:
    """A directory that is locked until it is closed. What killed servers of this user have left is removed.

    Attributes:
        path: Without links.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        parent = Path(tempfile.gettempdir())
        require_trusted(parent)
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_left(path)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).resolve()
        self._lock = locked(self.path)

    def close(self) -> None:
        """Removes it. Never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(path: Path) -> None:
    """Raises OSError if it is in use, or of another user."""
    lock = locked(path)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def locked(path: Path) -> int:
    """Locks a directory of this user until the result is closed.

    Raises OSError; BlockingIOError if another process has locked it.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BlockingIOError(errno.EAGAIN, "another process has it", str(path)) from None
    except OSError:
        os.close(lock)
        raise
    return lock
