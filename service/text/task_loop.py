"""The loop in a `TaskProcess`: reads tasks, runs them within limits, writes results.

The kernel enforces the limits, so they hold in native code too.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable

_LENGTH_BYTES = 4


def main(handle: Callable[[bytes], bytes]) -> int:
    """Runs tasks until the parent closes its pipe. The limits are the arguments of the process."""
    max_cpu_s, max_memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    # Both are sent to whole process groups; a gateway that drains still needs this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tasks, results = _take_pipes()
    _set_limits(max_memory_bytes)
    while (task := _read(tasks)) is not None:
        # SIGPROF is not handled, so it ends the process also in native code.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        result = handle(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(results, result)
    return 0


def _take_pipes() -> tuple[int, int]:
    """Moves both pipes to new descriptors, so that prints do not mix with results."""
    tasks, results = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return tasks, results


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


def _read(descriptor: int) -> bytes | None:
    """The next task; None: the pipe is closed."""
    length = _read_bytes(descriptor, _LENGTH_BYTES)
    return None if length is None else _read_bytes(descriptor, int.from_bytes(length, "big"))


def _read_bytes(descriptor: int, number: int) -> bytes | None:
    read = bytearray()
    while len(read) < number:
        part = os.read(descriptor, number - len(read))
        if not part:
            return None
        read += part
    return bytes(read)


def _write(descriptor: int, result: bytes) -> None:
    rest = memoryview(len(result).to_bytes(_LENGTH_BYTES, "big") + result)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
