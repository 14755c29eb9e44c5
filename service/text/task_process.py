"""A sandboxed process for untrusted programs: templates, grammars and tokenizers may loop, leak or crash.

The process gets tasks one by one over its pipes. It inherits no other file descriptor and no environment
variable with a secret. The kernel ends it if a task exceeds the CPU time or the process the memory.
`task_loop.py` runs in the process. This module is the parent's side: it blocks, so it is called in threads.
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
class ProcessLimits:
    """Limits of a process and of each of its tasks."""

    # CPU time of a task. Not elapsed time: a slow machine does not change what is refused.
    max_cpu_s: float
    # Address space of the process, its code included.
    max_memory_bytes: int
    max_result_bytes: int
    # Elapsed time of a task: for a process that hangs without computing.
    timeout_s: float = 120.0


class TaskFailed(Exception):
    """The process ended without a result. The message is a predicate: callers put a subject before it."""

    def __init__(self, reason: str, *, is_task_fault: bool) -> None:
        super().__init__(reason)
        # False: earlier tasks, or a kill from outside, may have caused it; the task can be retried.
        self.is_task_fault = is_task_fault


class TaskProcess:
    """One process, started by its first task and ended with this object. It runs one task at a time.

    `kill` may be called from any thread; the running task then fails.
    """

    def __init__(self, module: str, limits: ProcessLimits, setup_task: bytes | None = None) -> None:
        """`module`: what the process runs. `setup_task`: run before the first task; its result is dropped."""
        self.limits = limits
        # Tasks that succeeded, without the setup task.
        self.num_tasks = 0
        self._module = module
        self._setup_task = setup_task
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_killed = False

    def run(self, task: bytes) -> bytes:
        """Runs a task and returns its result. Ends the process if that fails. Raises TaskFailed."""
        deadline_s = time.monotonic() + self.limits.timeout_s
        process = self._start()
        max_bytes = self.limits.max_result_bytes
        try:
            if self._setup_task is not None:
                _write(process, self._setup_task, deadline_s)
                _read(process, max_bytes, deadline_s)
                self._setup_task = None
            _write(process, task, deadline_s)
            result = _read(process, max_bytes, deadline_s)
        except BaseException as error:
            self.close()
            if isinstance(error, (EOFError, BrokenPipeError)):
                raise self._failure(process.returncode) from None
            raise
        self.num_tasks += 1
        return result

    def kill(self) -> None:
        """Kills the process and does not wait for its end."""
        with self._lock:
            self._is_killed = True
            if self._popen is not None:
                self._popen.kill()

    def close(self) -> None:
        """Kills the process and waits for its end. Idempotent."""
        self.kill()
        if self._popen is not None:
            _reap(self._popen)

    @property
    def is_closed(self) -> bool:
        """Whether it was killed, so that every further task fails."""
        return self._is_killed

    @property
    def pid(self) -> int | None:
        """None: not started yet."""
        return None if self._popen is None else self._popen.pid

    def _start(self) -> subprocess.Popen[bytes]:
        """The process, started if it is not. Raises TaskFailed if it was killed."""
        with self._lock:
            if self._is_killed:
                raise TaskFailed("was stopped", is_task_fault=False)
            if self._popen is None:
                self._popen = _spawn(self._module, self.limits)
                weakref.finalize(self, _reap, self._popen)
            return self._popen

    def _failure(self, status: int) -> TaskFailed:
        if status == -signal.SIGPROF:
            return TaskFailed(f"used more than {self.limits.max_cpu_s:g} s of CPU time", is_task_fault=True)
        if status == -signal.SIGSEGV:
            return TaskFailed("crashed its process: it may be nested too deeply", is_task_fault=True)
        # After other tasks the cause may be what those left in memory, or a kill from outside.
        is_task_fault = self.num_tasks == 0
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            return TaskFailed("needs too much memory", is_task_fault=is_task_fault)
        return TaskFailed(f"ended its process with status {status}", is_task_fault=is_task_fault)


def environment() -> dict[str, str]:
    """The environment of a process: what Python, locale and time zone need, so no secrets."""
    path = os.pathsep.join(part or str(Path.cwd()) for part in sys.path)
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **kept}


def _spawn(module: str, limits: ProcessLimits) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - our own program
        # -P: modules are not imported from the current directory.
        [sys.executable, "-P", "-m", module, str(limits.max_cpu_s), str(limits.max_memory_bytes)],
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


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _write(process: subprocess.Popen[bytes], task: bytes, deadline_s: float) -> None:
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    rest = memoryview(len(task).to_bytes(_LENGTH_BYTES, "big") + task)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            _wait(descriptor, select.POLLOUT, deadline_s)


def _read(process: subprocess.Popen[bytes], max_bytes: int, deadline_s: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    result = bytearray()
    end: int | None = None
    while end is None or len(result) < end:
        _wait(descriptor, select.POLLIN, deadline_s)
        part = os.read(descriptor, _READ_BYTES)
        if not part:
            raise EOFError
        result += part
        if end is None and len(result) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(result[:_LENGTH_BYTES], "big")
        if end is not None and (end > _LENGTH_BYTES + max_bytes or len(result) > end):
            raise TaskFailed("wrote too large a result", is_task_fault=True)
    return bytes(memoryview(result)[_LENGTH_BYTES:])


def _wait(descriptor: int, events: int, deadline_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, events)
    if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        raise TaskFailed("took too long", is_task_fault=True)
