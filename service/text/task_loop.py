"""The program of a sandboxed process: reads tasks, runs them within limits, writes results.

The kernel enforces the limits, so they hold in native code too. See `sandbox` for what it takes away, and
`tasks` for the kinds of tasks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import socket
import sys
from typing import BinaryIO

from service.text.sandbox import confine

LENGTH_BYTES = 4
MAX_GREETING_BYTES = 1 << 10


def framed(message: bytes) -> bytes:
    """A message as it is sent: after its length."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def main() -> int:
    """Runs tasks until the parent closes the connection, or until a task raises an exception.

    The arguments of the process are a module, whose `handler()` returns what runs a task, and the limits.
    """
    module, max_cpu_s, max_memory_bytes, idle_s = (
        sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]),
    )  # fmt: skip
    # Both are sent to whole process groups; a gateway that drains still needs this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    handle = importlib.import_module(module).handler()
    connected = _take_socket()
    _set_limits(max_memory_bytes)
    null = os.open(os.devnull, os.O_WRONLY)
    missing = confine()
    # What went wrong until now, the parent logs. Nothing reads standard error from now on.
    os.dup2(null, 2)
    os.close(null)
    try:
        # It runs. What the system could not take from it, the parent logs, too.
        connected.sendall(framed(missing.encode()[:MAX_GREETING_BYTES]))
        reader = connected.makefile("rb")
        # The parent sends no task before it has the result of the last one: none waits in the reader.
        while not idle_s or select.select([connected], (), (), idle_s)[0]:
            task = _read(reader, int.from_bytes(_read(reader, LENGTH_BYTES), "big"))
            # SIGPROF is not handled, so it ends the process, also in native code.
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
            connected.sendall(framed(handle(task)))
    except EOFError:
        pass
    except BaseException:
        # At once: when the connection closes, the parent kills what has not ended, and would report that.
        os._exit(1)
    return 0


def _read(reader: BinaryIO, num_bytes: int) -> bytes:
    """Raises EOFError."""
    found = reader.read(num_bytes)
    if len(found) < num_bytes:
        raise EOFError
    return found


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


if __name__ == "__main__":
    sys.exit(main())
