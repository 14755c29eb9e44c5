"""The loop in a `TaskProcess`: reads tasks, runs them within limits, writes results.

The kernel enforces the limits, so they hold in native code too. See `sandbox` for what it takes away.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from service.text.sandbox import confine

_LENGTH_BYTES = 4
MAX_GREETING_BYTES = 1 << 10
_PART_BYTES = 1 << 16


class Connection:
    """Sends and receives messages over a socket, which it owns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # When `send` and `receive` raise TimeoutError, on the monotonic clock. None: never.
        self.deadline_s: float | None = None

    def send(self, message: bytes) -> None:
        """Raises OSError."""
        self._set_timeout()
        self._socket.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)

    def receive(self, max_bytes: int = sys.maxsize) -> bytes:
        """The next message. Raises EOFError, OSError; OverflowError if it is larger than `max_bytes`."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > max_bytes:
            raise OverflowError
        return self._read(length)

    def wait(self, timeout_s: float) -> bool:
        """Whether a message begins, or the connection ends, within a time; 0: without a limit."""
        return bool(select.select([self._socket], (), (), timeout_s or None)[0])

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            self._set_timeout()
            part = self._socket.recv(min(num_bytes - len(found), _PART_BYTES))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def _set_timeout(self) -> None:
        if self.deadline_s is not None:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)


def main(handle: Callable[[bytes], bytes]) -> int:
    """Runs tasks until the parent closes the connection, or until a task raises an exception.

    The limits are the arguments of the process.
    """
    max_cpu_s, max_memory_bytes, idle_s = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # Both are sent to whole process groups; a gateway that drains still needs this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(_take_socket())
    _set_limits(max_memory_bytes)
    null = os.open(os.devnull, os.O_WRONLY)
    missing = confine()
    # What went wrong until now, the parent logs. Nothing reads standard error from now on.
    os.dup2(null, 2)
    os.close(null)
    try:
        # It runs. What the system could not take from it, the parent logs, too.
        connection.send(missing.encode()[:MAX_GREETING_BYTES])
        while connection.wait(idle_s):
            task = connection.receive()
            # SIGPROF is not handled, so it ends the process, also in native code.
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
            result = handle(task)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(result)
    except EOFError:
        pass
    except BaseException:
        # At once: when the connection closes, the parent kills what has not ended, and would report that.
        os._exit(1)
    return 0


def _take_socket() -> socket.socket:
    """Moves the socket from the standard input to a new descriptor, where nothing else reads it."""
    taken = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return taken


def _set_limits(max_memory_bytes: int) -> None:
    """Limits the address space, and forbids writing files."""
    for resource_id, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        # Not every system supports each limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource_id, (limit, limit))
