"""A lock that gives a Unix socket path to one server at a time.

gRPC replaces the socket of another server at the same path, and removes the path when it stops. So a server
locks a file beside the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from workers.common.addresses import IN_USE


class LockedUnixSocket:
    """The lock on a socket path, until it is closed or this process ends."""

    def __init__(self, path: str) -> None:
        """Raises OSError if another server has the lock, or the path cannot be used."""
        self._lock_path = Path(f"{path}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self._lock_path, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(self._lock), self._lock_path.lstat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            # Another server has it, or has just removed the lock file because it stops.
            os.close(self._lock)
            raise OSError(errno.EADDRINUSE, IN_USE)
        try:
            _refuse_listener(path)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock, after the server has stopped."""
        # Removed while locked: a process that has opened it meanwhile sees that it is gone.
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock)


def _refuse_listener(path: str) -> None:
    """Raises OSError if a program without a lock listens there. A dead server's socket may be replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            # A program listens, and its queue is full.
            pass
    raise OSError(errno.EADDRINUSE, IN_USE)
