"""Files that are read again when they change. What cannot be read leaves what was read before in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from service.logging import get_logger

_log = get_logger(__name__)
_T = TypeVar("_T")


class Watched(Generic[_T]):
    """What `read` makes of some files, for any thread. `read` raises OSError or ValueError, at first here."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self._what = what
        self._paths = paths
        self._read = read
        # Taken before reading: a change in between is seen the next time.
        self._signature = self._look()
        self.value = read()

    def refresh(self) -> bool:
        """Reads again if a file has changed. Whether there is something new."""
        signature = self._look()
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            self.value = self._read()
        except Exception as error:
            # Whatever is wrong with a file: it must not end a server that runs.
            _log.error(f"cannot read the {self._what}: what was read before stays in force", error=str(error))
            return False
        _log.info(f"read the {self._what} again")
        return True

    def _look(self) -> tuple[object, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
