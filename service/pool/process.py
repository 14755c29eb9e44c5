"""A worker process on this machine, started by this gateway or by an earlier one.

A thread waits for a child. Any other is watched and signalled through a pidfd, which never refers to another
process, even if the pid is reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from service.pool.worker_directory import WorkerFile, lock_holder
from service.pool.worker_port import NamedWorker


def can_watch() -> bool:
    """Whether the system has pidfds, so that processes other than children can be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def find_process(worker: WorkerFile) -> tuple[int, int] | None:
    """The pid and a new pidfd of the process that holds a worker's lock. None: it has exited."""
    with contextlib.suppress(OSError):
        if (pid := lock_holder(worker.path)) > 1:
            pidfd = os.pidfd_open(pid)
            # Before that, the pid may have become another process's.
            if lock_holder(worker.path) == pid and _is_worker(pid, worker):
                return pid, pidfd
            os.close(pidfd)
    return None


def _is_worker(pid: int, worker: WorkerFile) -> bool:
    """A gateway that runs as root could kill any process: the lock alone is not trusted. Raises OSError."""
    command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return os.fsencode(worker.path) in command_line.split(b"\0")


class LocalProcess:
    """Owner of the pidfd. Needs a running event loop."""

    def __init__(
        self,
        pid: int,
        endpoint: NamedWorker,
        on_stopped: Callable[[], None],
        *,
        pidfd: int = -1,
        child: subprocess.Popen[bytes] | None = None,
        is_outdated: bool = False,
    ) -> None:
        """Takes ownership of the pidfd, or else of the child. `stop` calls `on_stopped`."""
        self.pid, self.epoch = pid, endpoint.epoch
        self.endpoint = endpoint
        self.is_outdated = is_outdated
        self._on_stopped = on_stopped
        self._pidfd = pidfd
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int | None] = self._loop.create_future()
        # None after `stop` or `detach`.
        self._send_signal: Callable[[signal.Signals], None] | None
        if pidfd >= 0:
            self._send_signal = functools.partial(signal.pidfd_send_signal, pidfd)
            self._loop.add_reader(pidfd, self._on_exit)
        else:
            assert child is not None
            self._send_signal = child.send_signal
            threading.Thread(target=self._wait_for, args=(child,), name="worker-process", daemon=True).start()

    async def wait(self) -> int | None:
        return await asyncio.shield(self._exited)

    async def stop(self, *, grace_s: float) -> int | None:
        """Waits up to `grace_s` for the process to end, then kills it. Returns its exit status, if known."""
        try:
            if grace_s:
                await asyncio.wait({self._exited}, timeout=grace_s)
        finally:
            self.kill()
            self._on_stopped()
        status = await asyncio.shield(self._exited)
        self.detach()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        return status

    def kill(self) -> None:
        if self._send_signal is not None:
            with contextlib.suppress(ProcessLookupError):
                self._send_signal(signal.SIGKILL)

    def detach(self) -> None:
        """A worker that cannot outlive us exits when its stdin closes."""
        self._send_signal = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pidfd = -1

    def _wait_for(self, child: subprocess.Popen[bytes]) -> None:
        # Its status is left to the event loop, which sends signals: no other process gets the pid before.
        try:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # it is taken already
            child.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        if not self._exited.done():
            self._exited.set_result(self._child.wait() if self._child is not None else None)
