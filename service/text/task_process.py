"""A sandboxed process for untrusted programs: templates, grammars and tokenizers may loop, leak or crash.

The process gets tasks one by one over a socket. It inherits no other file descriptor and no environment
variable with a secret, and gives up files, the network and other processes (`sandbox.py`). The kernel ends it
if a task exceeds the CPU time or the process the memory. `task_loop.py` runs in the process. A `TaskProcess`
is the parent's side: it blocks, so it is used in threads.

What fails before the first task is not the task's fault, but this server's: it is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from service.errors import Draining, HelperFailed
from service.logging import get_logger
from service.printable import escaped
from service.text.task_loop import MAX_GREETING_BYTES, Connection
from service.turns import Turns
from workers.common import child_process

_log = get_logger(__name__)

_Result = TypeVar("_Result")
_KEPT_ENVIRONMENT = ("PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")
# Until it has imported what it needs. For a process that hangs: a slow disk or a busy machine may need long.
_START_TIMEOUT_S = 120.0
# Of what it says when it starts, and what of that is logged.
_MAX_SAID_BYTES, _MAX_LOGGED_CHARACTERS = 1 << 16, 500


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
    # A process that gets no task for so long ends itself, and is reaped with the next task; 0: never.
    idle_s: float = 0.0


class TaskFailed(Exception):
    """The process ended without a result. The message is a predicate: callers put a subject before it."""

    def __init__(self, reason: str, *, is_task_fault: bool = True) -> None:
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
        self._connection: Connection
        self._lock = threading.Lock()
        # Whether it was killed, so that every further task fails.
        self.is_closed = False
        # Whether `kill` ended a task.
        self._was_killed = False

    def run(self, task: bytes) -> bytes:
        """Runs a task and returns its result. Ends the process if that fails.

        Raises TaskFailed; HelperFailed if the process cannot start, or fails before the task.
        """
        try:
            self._start()
            self._connection.deadline_s = time.monotonic() + self.limits.timeout_s
            if self._setup_task is not None:
                self._set_up(self._setup_task)
                self._setup_task = None
            result = self._exchange(task)
        except BaseException:
            self.close()
            raise
        self.num_tasks += 1
        return result

    def kill(self) -> None:
        """Kills the process and does not wait for its end."""
        with self._lock:
            self.is_closed = True
            if self._popen is not None:
                self._popen.kill()

    def close(self) -> None:
        """Kills the process and waits for its end. Must not be called during a task. Idempotent."""
        self.kill()
        if self._popen is not None:
            _reap(self._popen, self._connection)

    @property
    def pid(self) -> int | None:
        """None: not started yet."""
        return None if self._popen is None else self._popen.pid

    def _start(self) -> None:
        """Starts the process if it is not. Raises HelperFailed, or TaskFailed if it was killed."""
        with self._lock:
            if self.is_closed:
                raise TaskFailed("was stopped", is_task_fault=False)
            if self._popen is not None:
                return
            reads, writes = os.pipe()
            try:
                self._popen, self._connection = _spawn(self._module, self.limits, writes)
            except OSError as error:
                os.close(reads)
                raise self._not_started(error.strerror or str(error)) from None
            finally:
                os.close(writes)
            weakref.finalize(self, _abandon, self._popen, self._connection)
        with os.fdopen(reads, "rb") as said:
            self._connection.deadline_s = time.monotonic() + _START_TIMEOUT_S
            try:
                _log_missing(self._connection.receive(MAX_GREETING_BYTES).decode())
            except (OSError, EOFError, OverflowError):
                was_killed = self.is_closed
                self.close()
                if was_killed:
                    raise TaskFailed("was stopped", is_task_fault=False) from None
                os.set_blocking(said.fileno(), False)
                raise self._not_started(
                    (said.read(_MAX_SAID_BYTES) or b"").decode(errors="replace")
                ) from None

    def _set_up(self, task: bytes) -> None:
        """Runs the task before the first one. Raises HelperFailed, or TaskFailed if it was killed."""
        try:
            self._exchange(task)
        except TaskFailed as error:
            if self._was_killed:
                raise
            raise self._not_started(str(error)) from None

    def _not_started(self, why: str) -> HelperFailed:
        """Logs it. The last line of what the process has said is the error."""
        status = None if self._popen is None else self._popen.returncode
        last = escaped((why.strip().splitlines() or [""])[-1])[:_MAX_LOGGED_CHARACTERS]
        _log.error("a helper process did not start", module=self._module, status=status, error=last)
        return HelperFailed()

    def _exchange(self, task: bytes) -> bytes:
        try:
            self._connection.send(task)
            return self._connection.receive(self.limits.max_result_bytes)
        except OverflowError:
            raise TaskFailed("wrote too large a result") from None
        except TimeoutError:
            raise TaskFailed("took too long") from None
        except (EOFError, ConnectionError):
            self._was_killed = self.is_closed
            self.close()
            raise self._failure() from None

    def _failure(self) -> TaskFailed:
        """Why the process, which has ended, gave no result."""
        assert self._popen is not None
        if self._was_killed:
            return TaskFailed("was stopped", is_task_fault=False)
        status = self._popen.returncode
        if status == -signal.SIGPROF:
            return TaskFailed(f"used more than {self.limits.max_cpu_s:g} s of CPU time")
        if status == -signal.SIGSEGV:
            return TaskFailed("crashed its process: it may be nested too deeply")
        # After other tasks the cause may be what they left in memory, or a kill from outside. 0: it was idle.
        is_task_fault = self.num_tasks == 0 and status != 0
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            return TaskFailed("needs too much memory", is_task_fault=is_task_fault)
        return TaskFailed(f"ended its process with status {status}", is_task_fault=is_task_fault)


class TaskPool:
    """Owns processes of one kind, which are reused: a task costs a millisecond, not a start of Python.

    A process that has ended, or has run `max_tasks` tasks, is replaced. Used from one event loop.
    """

    def __init__(
        self,
        new_process: Callable[[], TaskProcess],
        max_processes: int = 1,
        max_tasks: float = math.inf,
    ) -> None:
        self._new_process = new_process
        # Their own: a task takes seconds, for which nothing else may wait.
        self._threads = ThreadPoolExecutor(max_processes, "task")
        self._max_tasks = max_tasks
        self._turns = Turns(max_processes)
        # The most recently used last.
        self.idle: list[TaskProcess] = []
        self._busy: set[TaskProcess] = set()
        self._is_closed = False

    async def run(self, work: Callable[[TaskProcess], _Result], tenant: str = "") -> _Result:
        """Calls `work` with a process, in a thread, when it is the tenant's turn.

        Cancelling the call ends the process. Retries if something other than this task ended the process.
        Raises what `work` raises; Draining once the pool is closed.
        """
        while True:
            async with self._turns.turn(tenant):
                if self._is_closed:
                    raise Draining
                process = self.idle.pop() if self.idle else self._new_process()
                self._busy.add(process)
                try:
                    return await self._run_in_thread(work, process)
                except TaskFailed as error:
                    if self._is_closed:
                        raise Draining from None
                    if error.is_task_fault:
                        raise
                finally:
                    self._busy.discard(process)
                    if not (process.is_closed or self._is_closed):
                        self.idle.append(process)

    def close(self) -> None:
        """Ends all processes; running tasks fail. Idempotent."""
        self._is_closed = True
        for process in self._busy:
            process.kill()
        for process in self.idle:
            process.close()
        self.idle.clear()
        self._threads.shutdown(wait=False)

    def _run(self, work: Callable[[TaskProcess], _Result], process: TaskProcess) -> _Result:
        """Runs in a thread, as does the wait for the end of a process that is not used again."""
        try:
            return work(process)
        finally:
            if process.is_closed or process.num_tasks >= self._max_tasks:
                process.close()

    async def _run_in_thread(self, work: Callable[[TaskProcess], _Result], process: TaskProcess) -> _Result:
        """The result of `work`. Returns only when the thread no longer uses the process."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, process)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            while not running.done():
                # Cancelled again: still not before the thread has ended.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            # Marks the exception as retrieved.
            _ = running.cancelled() or running.exception()
            raise


@functools.cache
def _log_missing(what: str) -> None:
    """What processes cannot be confined with here. Once."""
    if what:
        event = (
            "helper processes can read files of this user, or reach others: the system lacks what prevents it"
        )
        _log.warning(event, missing=escaped(what))


def environment() -> dict[str, str]:
    """The environment of a process: what Python, locale and time zone need, so no secrets."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return {"PYTHONPATH": child_process.import_path(), "PYTHONDONTWRITEBYTECODE": "1", **kept}


def _spawn(module: str, limits: ProcessLimits, errors: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """A new process, and the connection to it. `errors`: its standard error until it runs. Raises OSError."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    arguments = map(str, (limits.max_cpu_s, limits.max_memory_bytes, limits.idle_s))
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                # -P: modules are not imported from the current directory.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=child_process.DIRECTORY,
                env=environment(),
            )
        except BaseException:
            connection.close()
            raise
    return process, connection


def _abandon(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Ends a process whose owner is gone. An event loop does not wait for its end."""
    process.kill()
    connection.close()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        process.wait()
    else:
        threading.Thread(target=process.wait, name="reap", daemon=True).start()


def _reap(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
