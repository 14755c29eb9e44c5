"""Standard error with non-blocking writes.

Without it a pipe that is not read would block the thread that logs, and with it the server or the worker.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable

# The limit of the queue.
_MAX_WAITING_BYTES = 4 << 20
# The delay between attempts on a non-blocking file.
_RETRY_S = 0.05


class BackgroundLog:
    """A text stream on a file descriptor, written by a thread. Lines that do not fit the queue are dropped.

    When writing works again, `on_dropped` is called with the number of dropped lines.
    """

    def __init__(self, fd: int, on_dropped: Callable[[int], None]) -> None:
        self._fd = fd
        self._on_dropped = on_dropped
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._dropped = 0
        # Ends a line of which only the beginning could be written.
        self._line_end = b""
        self._changed = threading.Condition()
        # A daemon thread: a blocked write must not keep the process alive.
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Queues lines. Never blocks."""
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
        """Does nothing. See `drain`."""

    def drain(self, timeout_s: float) -> None:
        """Waits until everything is written, for `timeout_s` at most."""
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
                self._on_dropped(dropped)

    def _write(self, data: bytes) -> bool:
        """Writes all of `data`, however long that takes. False if the reader is gone, or the disk is full."""
        rest = whole = memoryview(self._line_end + data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                if len(rest) < len(whole):
                    self._line_end = b"\n"
                return False
        self._line_end = b""
        return True
