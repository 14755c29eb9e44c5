"""A Unix socket of one server at a time.

gRPC takes the path from whoever listens there, and removes it when it stops. So whoever listens holds a lock
on a file beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

IN_USE = "another process has this address; choose another one with --listen"


class OwnSocket:
    """The right to listen on a path, as long as this process lives or until it is closed."""

    def __init__(self, path: str) -> None:
        """Raises OSError: another server has it, or nobody can."""
        self._lock_path = Path(f"{path}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self._lock_path, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(self._lock), self._lock_path.lstat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            # Another server's, or of one that ends and has just removed it.
            os.close(self._lock)
            raise OSError(errno.EADDRINUSE, IN_USE)
        try:
            _refuse_listener(path)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Lets others have it, after the server has stopped."""
        # While it is locked: whoever has opened it meanwhile sees that it is gone.
        with contextlib.suppress(OSError):
            self._lock_path.unlink()
        os.close(self._lock)


def _refuse_listener(path: str) -> None:
    """Raises OSError if somebody without a lock listens there. What a dead server has left may be taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            # Its queue is full: there is somebody.
            pass
    raise OSError(errno.EADDRINUSE, IN_USE)
