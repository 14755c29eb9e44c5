"""The inside of a `TaskProcess`: reads tasks, does them within bounds, writes answers.

The bounds are kept by the kernel, so that they hold in code that Python does not run.
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
    """Answers tasks until nobody asks any more. The arguments of the process are its bounds."""
    max_cpu_s, max_memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    # They reach whole process groups; whoever asks may want to go on for a while.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    tasks, answers = _own_pipes()
    _bound(max_memory_bytes)
    while (task := _read(tasks)) is not None:
        # Its signal is not handled: it ends the process wherever that is.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        answer = handle(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)
    return 0


def _own_pipes() -> tuple[int, int]:
    """Both pipes, where nothing finds them that writes to the standard output."""
    tasks, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return tasks, answers


def _bound(max_memory_bytes: int) -> None:
    """Bounds what this process can take from now on; it writes no files."""
    for what, bound in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        # Not every system has each of them.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (bound, bound))


def _read(descriptor: int) -> bytes | None:
    """A task; None: there is no more."""
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


def _write(descriptor: int, answer: bytes) -> None:
    rest = memoryview(len(answer).to_bytes(_LENGTH_BYTES, "big") + answer)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
