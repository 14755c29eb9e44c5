"""The directory of a gateway's own, in which the sockets of workers lie that end with it.

It is named after the process, and locked for as long as the process lives: so another gateway can tell what a
dead one has left, and removes it; and cleaners of temporary files that honour locks pass it over. If it
vanishes all the same it is made again. It does not know processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from service.logging import get_logger

_log = get_logger(__name__)

_PREFIX = "quire-"
# sockaddr_un holds 108 bytes with the terminating zero.
MAX_SOCKET_PATH_BYTES = 107
# The longest name of a socket, with some room.
_MAX_NAME_BYTES = 26


def state_dir() -> Path:
    """Where a user's programs keep their state, as the XDG base directory specification has it."""
    home = os.environ.get("HOME", "")
    # Relative paths are to be passed over, says the specification. A user without a home has no state either.
    for base in (os.environ.get("XDG_STATE_HOME", ""), home and f"{home}/.local/state"):
        if base.startswith("/"):
            return Path(base) / "quire"
    return Path(tempfile.gettempdir()) / "quire"


class RuntimeDirectory:
    """Owner of the directory and of its lock. In `data_dir`; where that cannot be, among temporary files."""

    def __init__(self, data_dir: Path) -> None:
        name = f"{_PREFIX}{os.getpid()}-{time.time_ns() // 1_000_000}"
        self._places = [data_dir.resolve() / "run" / name, Path(tempfile.gettempdir()) / name]
        self._path: Path | None = None
        self._lock = -1

    def socket_path(self, name: str) -> Path:
        """Where a socket of that name goes. Makes the directory if it is not there. Raises OSError."""
        if self._path is None or not is_locked_by(self._lock, self._path):
            self._path = self._make()
        return self._path / name

    def close(self) -> None:
        """Removes it with all that is in it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        self._unlock()
        self._path = None

    def _make(self) -> Path:
        *others, last = self._places
        for place in others:
            try:
                return self._make_in(place)
            except OSError as error:
                _log.warning(
                    "sockets go to the temporary directory", data_dir=str(place.parent), error=error.strerror
                )
        return self._make_in(last)

    def _make_in(self, place: Path) -> Path:
        if len(os.fsencode(place)) + 1 + _MAX_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", str(place))
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(place.parent)
        self._unlock()
        place.mkdir(mode=0o700)
        try:
            self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            # Fails if another gateway is looking at it right now, which then removes it: that is tried again.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_locked_by(self._lock, place):
                raise BlockingIOError(errno.EAGAIN, "it was removed by another gateway", str(place))
        except OSError:
            self._unlock()
            with contextlib.suppress(OSError):
                place.rmdir()
            raise
        return place

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def is_locked_by(lock: int, path: Path) -> bool:
    """Whether the directory that is locked is the one that now goes by the path."""
    try:
        return os.path.samestat(os.fstat(lock), path.lstat())
    except FileNotFoundError:
        return False


def _sweep(parent: Path) -> None:
    """Removes what gateways of this user have left that are dead: those whose lock can be had."""
    for path in _own_directories(parent):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _own_directories(parent: Path) -> Iterator[Path]:
    with os.scandir(parent) as entries:
        for entry in entries:
            number = entry.name.removeprefix(_PREFIX).replace("-", "")
            # Others may have names that begin like ours.
            named = entry.name.startswith(_PREFIX) and number.isdigit()
            if named and entry.is_dir(follow_symlinks=False) and _is_own(entry):
                yield Path(entry.path)


def _is_own(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False
