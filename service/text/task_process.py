"""A sandboxed process for tasks of one kind, from the gateway's side.

The process gets tasks one by one over a socket. It inherits no other file descriptor and no environment
variable with a secret, and gives up files, the network and other processes (`sandbox.py`). The kernel ends it
if a task exceeds the CPU time or the process the memory. `task_loop.py` runs in the process.

The socket is the event loop's, so that a task needs no thread. Only starting a process and waiting for its
end, which block, are done in threads. What fails before the first task is not the task's fault, but this
server's: it is logged.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref

from service.completion import complete
from service.errors import HelperFailed
from service.logging import get_logger
from service.printable import escaped
from service.text.task_loop import LENGTH_BYTES, MAX_GREETING_BYTES, framed
from service.text.tasks import TaskKind
from workers.common import child_process

_log = get_logger(__name__)

_PROGRAM = "service.text.task_loop"
_KEPT_ENVIRONMENT = ("PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")
# Until it has imported what it needs. For a process that hangs: a slow disk or a busy machine may need long.
_START_TIMEOUT_S = 120.0
# Limits of what the process prints when it starts, and of how much of that is logged.
_MAX_SAID_BYTES, _MAX_LOGGED_CHARACTERS = 1 << 16, 500
# Read from the socket at once. Memory for more is mapped anew for each read.
_PART_BYTES = 1 << 16


class TaskFailed(Exception):
    """The process ended without a result. The message is a predicate: callers put a subject before it."""

    def __init__(self, reason: str, *, is_task_fault: bool = True, fails_again: bool = True) -> None:
        super().__init__(reason)
        # False: earlier tasks, or a kill from outside, may have caused it; the task can be retried.
        self.is_task_fault = is_task_fault
        # False: it may be due to what else runs on the machine.
        self.fails_again = fails_again


class _Stopped(TaskFailed):
    """`kill` ended the process, or came before its start."""


class TaskProcess:
    """One process, started by its first task and ended with this object. It runs one task at a time.

    Used from one event loop at a time.
    """

    def __init__(self, kind: TaskKind, setup_task: bytes | None = None) -> None:
        """`setup_task`: run before the first task; its result is dropped."""
        self.kind = kind
        # Tasks that succeeded, without the setup task.
        self.num_tasks = 0
        self._setup_task = setup_task
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        # Whether it was killed, so that every further task fails.
        self.is_closed = False
        # Whether it was killed because a task took too long.
        self._is_late = False

    async def run(self, task: bytes) -> bytes:
        """Runs a task and returns its result. Ends the process if that fails or is cancelled.

        Raises TaskFailed; HelperFailed if the process cannot start, or fails before the task.
        """
        try:
            self._check_open()
            if self._popen is None:
                await self._start()
            if self._setup_task is not None:
                await self._set_up(self._setup_task)
                self._setup_task = None
            result = await self._exchange(task)
        except BaseException:
            await self.end()
            raise
        self.num_tasks += 1
        return result

    def kill(self) -> None:
        """Kills the process and does not wait for its end. A running task fails."""
        self.is_closed = True
        if self._popen is not None:
            self._popen.kill()

    async def end(self) -> None:
        """Kills the process and waits for its end. Must not be called during a task. Idempotent."""
        self.kill()
        if self._popen is not None:
            if self._popen.returncode is None:
                await complete(asyncio.to_thread(self._popen.wait))
            self._socket.close()

    def close(self) -> None:
        """As `end`, but blocks for some milliseconds: for when the server stops."""
        self.kill()
        if self._popen is not None:
            self._popen.wait()
            self._socket.close()

    @property
    def pid(self) -> int | None:
        """None: not started yet."""
        return None if self._popen is None else self._popen.pid

    async def _start(self) -> None:
        """Starts the process. Raises HelperFailed, or TaskFailed if it was killed."""
        try:
            reads, writes = os.pipe()
        except OSError as error:
            raise self._not_started(error.strerror or str(error)) from None
        with os.fdopen(reads, "rb") as said:
            try:
                # If it is cancelled, it waits for the start, and `run` ends the process.
                await complete(asyncio.to_thread(self._spawn, writes))
            except OSError as error:
                raise self._not_started(error.strerror or str(error)) from None
            finally:
                os.close(writes)
            self._check_open()
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    _log_missing((await self._receive(MAX_GREETING_BYTES)).decode())
            except (OSError, EOFError, OverflowError):
                self._check_open()
                await self.end()
                os.set_blocking(said.fileno(), False)
                raise self._not_started(
                    (said.read(_MAX_SAID_BYTES) or b"").decode(errors="replace")
                ) from None

    def _spawn(self, errors: int) -> None:
        """Runs in a thread. `errors`: the process's standard error until it runs. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        kind = self.kind
        arguments = map(str, (kind.module, kind.max_cpu_s, kind.max_memory_bytes, kind.idle_s))
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 - our own program
                    # -P: modules are not imported from the current directory.
                    [sys.executable, "-P", "-m", _PROGRAM, *arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd=child_process.DIRECTORY,
                    env=environment(),
                )
            except BaseException:
                ours.close()
                raise
        self._socket, self._popen = ours, process
        weakref.finalize(self, _abandon, process, ours)
        if self.is_closed:
            process.kill()

    def _check_open(self) -> None:
        if self.is_closed:
            raise _Stopped("was stopped", is_task_fault=False)

    async def _set_up(self, task: bytes) -> None:
        """Runs the task before the first one. Raises HelperFailed, or TaskFailed if it was killed."""
        try:
            await self._exchange(task)
        except _Stopped:
            raise
        except TaskFailed as error:
            raise self._not_started(str(error)) from None

    def _not_started(self, why: str) -> HelperFailed:
        """Logs it. The last line of what the process has said is the error."""
        status = None if self._popen is None else self._popen.returncode
        last = escaped((why.strip().splitlines() or [""])[-1])[:_MAX_LOGGED_CHARACTERS]
        _log.error("a helper process did not start", module=self.kind.module, status=status, error=last)
        return HelperFailed()

    async def _exchange(self, task: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        # Not `asyncio.timeout`, which takes as long as a short task.
        deadline = loop.call_later(self.kind.timeout_s, self._end_late)
        try:
            await loop.sock_sendall(self._socket, framed(task))
            return await self._receive(self.kind.max_result_bytes)
        except OverflowError:
            raise TaskFailed("wrote too large a result") from None
        except (EOFError, ConnectionError):
            self._check_open()
            await self.end()
            raise self._failure() from None
        finally:
            deadline.cancel()

    def _end_late(self) -> None:
        """Ends the process, and so the task that takes too long."""
        assert self._popen is not None
        self._is_late = True
        self._popen.kill()

    async def _receive(self, max_bytes: int) -> bytes:
        """The next message. Raises EOFError, OSError; OverflowError if it is larger than `max_bytes`."""
        loop = asyncio.get_running_loop()
        found = bytearray()
        end = LENGTH_BYTES
        while len(found) < end:
            part = await loop.sock_recv(self._socket, _PART_BYTES)
            if not part:
                raise EOFError
            found += part
            if end == LENGTH_BYTES and len(found) >= LENGTH_BYTES:
                end += int.from_bytes(found[:LENGTH_BYTES], "big")
                if end > max_bytes + LENGTH_BYTES:
                    raise OverflowError
            if len(found) < end:
                # What is there already is read without waiting: others run between the parts.
                await asyncio.sleep(0)
        if len(found) > end:
            # A second message, which nobody has asked for.
            raise OverflowError
        return bytes(memoryview(found)[LENGTH_BYTES:])

    def _failure(self) -> TaskFailed:
        """Why the process, which has ended, gave no result."""
        assert self._popen is not None
        if self._is_late:
            return TaskFailed("took too long", fails_again=False)
        status = self._popen.returncode
        if status == -signal.SIGPROF:
            return TaskFailed(f"used more than {self.kind.max_cpu_s:g} s of CPU time")
        if status == -signal.SIGSEGV:
            return TaskFailed("crashed its process: it may be nested too deeply")
        # After other tasks the cause may be what they left in memory, or a kill from outside. 0: it was idle.
        is_task_fault = self.num_tasks == 0 and status != 0
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            was_killed = status == -signal.SIGKILL
            return TaskFailed(
                "needs too much memory", is_task_fault=is_task_fault, fails_again=not was_killed
            )
        return TaskFailed(f"ended its process with status {status}", is_task_fault=is_task_fault)


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


def _abandon(process: subprocess.Popen[bytes], connected: socket.socket) -> None:
    """Ends a process whose owner is gone. An event loop does not wait for its end."""
    process.kill()
    connected.close()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        process.wait()
    else:
        threading.Thread(target=process.wait, name="reap", daemon=True).start()
