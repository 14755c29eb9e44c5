"""A process of its own for what others have written: templates and grammars, which may loop, swell or crash.

It is given tasks one by one over its pipes and has nothing else of ours: no descriptors, no environment. Each
task may compute for so long, the process hold so much; the kernel ends it if not. What runs in it is in
`task_loop.py`. This side blocks, and is called in threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

_KEPT_ENVIRONMENT = ("PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a process may take."""

    # Of the processor's time, for each task: a slow machine does not change what is refused.
    max_cpu_s: float
    # Of address space, all that the process itself is made of included.
    max_memory_bytes: int
    max_answer_bytes: int
    # For a process that does not compute either.
    patience_s: float = 120.0


class TaskFailed(Exception):
    """The process ended, or was ended, instead of answering. The message goes on after a noun."""

    def __init__(self, reason: str, *, is_own_doing: bool) -> None:
        super().__init__(reason)
        # It was this task that did it, and not what earlier ones had left.
        self.is_own_doing = is_own_doing


class TaskProcess:
    """One process, which is started by its first task and ended with this object. One task at a time.

    `kill` may be called from any thread; the task under way then fails.
    """

    def __init__(self, module: str, bounds: Bounds) -> None:
        self.bounds = bounds
        # Tasks that were answered.
        self.num_tasks = 0
        self._module = module
        self._started: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._is_killed = False

    def ask(self, request: bytes) -> bytes:
        """Does a task. Raises TaskFailed; the process is gone then."""
        deadline_s = time.monotonic() + self.bounds.patience_s
        process = self._process()
        try:
            _write(process, request, deadline_s)
            answer = _read(process, self.bounds.max_answer_bytes, deadline_s)
        except BaseException as error:
            self.end()
            if isinstance(error, (EOFError, BrokenPipeError)):
                raise self._why(process.returncode) from None
            raise
        self.num_tasks += 1
        return answer

    def kill(self) -> None:
        """Ends it without waiting for that."""
        with self._starting:
            self._is_killed = True
            if self._started is not None:
                self._started.kill()

    def end(self) -> None:
        """Ends it. May be called again."""
        self.kill()
        if self._started is not None:
            _end(self._started)

    @property
    def pid(self) -> int | None:
        """None: it was not started yet."""
        return None if self._started is None else self._started.pid

    def _process(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._is_killed:
                raise TaskFailed("was ended", is_own_doing=False)
            if self._started is None:
                self._started = _start(self._module, self.bounds)
                weakref.finalize(self, _end, self._started)
            return self._started

    def _why(self, status: int) -> TaskFailed:
        if status == -signal.SIGPROF:
            return TaskFailed(f"computed for more than {self.bounds.max_cpu_s:g} s", is_own_doing=True)
        if status == -signal.SIGSEGV:
            return TaskFailed("crashed its process: it may be nested too deeply", is_own_doing=True)
        is_own_doing = self.num_tasks == 0
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            return TaskFailed("needs too much memory", is_own_doing=is_own_doing)
        return TaskFailed(f"ended its process with status {status}", is_own_doing=is_own_doing)


def environment() -> dict[str, str]:
    """What Python and the local time need, and none of the caller's secrets."""
    path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **kept}


def _start(module: str, bounds: Bounds) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - our own program
        # -P: nothing is imported from where the caller happens to be.
        [sys.executable, "-P", "-m", module, str(bounds.max_cpu_s), str(bounds.max_memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
        bufsize=0,
    )
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _write(process: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> None:
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    rest = memoryview(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            _wait(descriptor, select.POLLOUT, deadline_s)


def _read(process: subprocess.Popen[bytes], max_bytes: int, deadline_s: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    answer = bytearray()
    until: int | None = None
    while until is None or len(answer) < until:
        _wait(descriptor, select.POLLIN, deadline_s)
        part = os.read(descriptor, _READ_BYTES)
        if not part:
            raise EOFError
        answer += part
        if until is None and len(answer) >= _LENGTH_BYTES:
            until = _LENGTH_BYTES + int.from_bytes(answer[:_LENGTH_BYTES], "big")
        if until is not None and (until > _LENGTH_BYTES + max_bytes or len(answer) > until):
            raise TaskFailed("wrote too much", is_own_doing=True)
    return bytes(memoryview(answer)[_LENGTH_BYTES:])


def _wait(descriptor: int, events: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, events)
    if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        raise TaskFailed("took too long", is_own_doing=True)
