"""Standard error that never blocks who writes to it. The twin of `service/background_log.py`.

A pipe that nobody reads would otherwise stop the thread that logs, and with it all that it serves.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import time
from collections.abc import Callable

import structlog

# What may wait to be written.
_MAX_WAITING_BYTES = 4 << 20
# Between attempts where the file itself does not block.
_RETRY_S = 0.05


class BackgroundLog:
    """A text stream on a file descriptor; a thread of its own writes. What finds no room is dropped.

    When writing works again, `tell_dropped` is called with the number of lines that were dropped.
    """

    def __init__(self, fd: int, tell_dropped: Callable[[int], None]) -> None:
        self._fd = fd
        self._tell_dropped = tell_dropped
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        # A daemon: a write that is stuck must not keep the process.
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Hands lines over. Never blocks."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) > _MAX_WAITING_BYTES:
                self._dropped += max(1, text.count("\n"))
            else:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: who writes does not wait. See `drain`."""

    def drain(self, timeout_s: float) -> None:
        """Waits until all is written, for `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting[0]
            written = self._write(data)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(data)
                if written:
                    dropped, self._dropped = self._dropped, 0
                else:
                    dropped, self._dropped = 0, self._dropped + data.count(b"\n")
                self._changed.notify_all()
            if dropped:
                self._tell_dropped(dropped)

    def _write(self, data: bytes) -> bool:
        """Writes all of it, however long that takes. False if nobody can ever read it."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                return False
        return True


@functools.cache
def background_log() -> BackgroundLog:
    """The one writer of this process to standard error."""
    log = structlog.get_logger("workers")
    return BackgroundLog(
        sys.stderr.fileno(), lambda lines: log.warning("log lines were dropped", lines=lines)
    )
