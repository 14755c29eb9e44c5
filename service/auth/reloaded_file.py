"""Files that are reloaded when they change. After a failure the previous contents stay in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from service.logging import get_logger

_log = get_logger(__name__)
_T = TypeVar("_T")


class ReloadedFile(Generic[_T]):
    """The value that `read` returns for some files, for any thread. The constructor passes on its errors."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self._what = what
        self._paths = paths
        self._read = read
        # Before reading, so that a change in between is seen next time.
        self._signature = self._signatures()
        self.value = read()

    def refresh(self) -> bool:
        """Reloads if a file has changed. Returns whether the value is new."""
        signature = self._signatures()
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            self.value = self._read()
        except Exception as error:
            # A bad file must not end a running server.
            _log.error(f"cannot reload the {self._what}: the previous contents stay in use", error=str(error))
            return False
        _log.info(f"reloaded the {self._what}")
        return True

    def _signatures(self) -> tuple[object, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError as error:
        return error.errno
    # A program can set the time of the content back, but not that of the file's last change.
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
