"""A worker process on this machine, started by this gateway or by an earlier one.

It is watched and signalled through a pidfd, which never refers to another process, even if the pid is reused.
On systems without pidfds only child processes are watched, each by a thread.
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

from service.pool.endpoints import SocketEndpoint
from service.pool.registry import RegistryEntry
from workers.common.protocol import END_SIGNAL

_START_FIELD = 19  # index among the fields of /proc/PID/stat after the name


def can_watch() -> bool:
    """Whether pidfds work here, so that processes other than children can be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def boot_id() -> str:
    """An id that changes with each boot of the machine. Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since boot. Raises OSError."""
    # The name, in parentheses, may contain spaces and parentheses.
    after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    return int(after_name.split()[_START_FIELD])


class LocalProcess:
    """Owner of the pidfd. Needs a running event loop."""

    leaving: asyncio.Future[float] | None = None

    def __init__(
        self,
        entry: RegistryEntry,
        on_stopped: Callable[[RegistryEntry], None],
        *,
        pidfd: int = -1,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Takes ownership of the pidfd, or of a child without one. `stop` calls `on_stopped`."""
        self._entry = entry
        self.epoch, self.pid = entry.epoch, entry.pid
        self.endpoint = SocketEndpoint(entry.socket, entry.secret)
        self.is_outdated = False
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

    @classmethod
    def attach(cls, entry: RegistryEntry, on_stopped: Callable[[RegistryEntry], None]) -> LocalProcess | None:
        """Opens the process of a registry entry. None if it has exited."""
        try:
            pidfd = os.pidfd_open(entry.pid)
        except OSError:
            return None
        if _is_its_process(entry):
            return cls(entry, on_stopped, pidfd=pidfd)
        os.close(pidfd)
        return None

    async def wait(self) -> int | None:
        return await asyncio.shield(self._exited)

    async def stop(self, *, grace_s: float) -> int | None:
        try:
            if grace_s:
                self._signal(END_SIGNAL)
                await asyncio.wait({self._exited}, timeout=grace_s)
        finally:
            self.kill()
            self._on_stopped(self._entry)
        status = await asyncio.shield(self._exited)
        self.detach()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        return status

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def detach(self) -> None:
        """A worker that cannot outlive us exits when its stdin closes."""
        self._send_signal = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pidfd = -1

    def _wait_for(self, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        if not self._exited.done():
            self._exited.set_result(self._child.wait() if self._child is not None else None)

    def _signal(self, number: signal.Signals) -> None:
        if self._send_signal is not None:
            with contextlib.suppress(ProcessLookupError):
                self._send_signal(number)


def _is_its_process(entry: RegistryEntry) -> bool:
    """Whether the process with the entry's pid is the one that the entry describes, and runs."""
    try:
        command_line = Path(f"/proc/{entry.pid}/cmdline").read_bytes()
        same = (boot_id(), start_ticks(entry.pid)) == (entry.boot_id, entry.start_ticks)
    except (OSError, ValueError, IndexError):
        return False
    # A gateway that runs as root could kill any process: the file alone is not trusted.
    return same and os.fsencode(entry.socket) in command_line.split(b"\0")
