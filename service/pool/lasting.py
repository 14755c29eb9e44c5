"""A worker's process that can outlive its gateway, be it our child or that of a gateway before this one.

It is watched and signalled through a pidfd, which is that process's for ever, whatever becomes of its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from service.pool.registry import Entry

# By it a worker is told to end. It ignores SIGTERM, which reaches all processes of a service at once.
END_SIGNAL = signal.SIGUSR1
_START_FIELD = 19  # Of those in /proc/PID/stat that follow the name.


class Forgets(Protocol):
    """Who has written down what runs."""

    def remove(self, entry: Entry) -> None:
        """It has ended."""


def can_watch() -> bool:
    """Whether processes that are not our children can be watched: on Linux, where it is not forbidden."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def boot_id() -> str:
    """Differs from one start of the machine to the next. Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """When a process was started, in ticks of this boot. Raises OSError."""
    # The name, in parentheses, can hold anything.
    after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    return int(after_name.split()[_START_FIELD])


def address_of(socket: str) -> str:
    """A socket as gRPC names it: a URI, in which some characters of paths mean something else."""
    return f"unix:{quote(socket)}"


class LastingProcess:
    """Owner of the pidfd. Needs a running event loop."""

    def __init__(
        self, entry: Entry, registry: Forgets, pidfd: int, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.address = address_of(entry.socket)
        self.pid = entry.pid
        self.secret = entry.secret
        self._entry = entry
        self._registry = registry
        self._pidfd = pidfd
        # Of its standard input the other end is closed when we end, upon which nothing happens any more.
        self._child = child
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_end)

    @classmethod
    def find(cls, entry: Entry, registry: Forgets) -> LastingProcess | None:
        """The process of an entry, if it still runs."""
        try:
            pidfd = os.pidfd_open(entry.pid)
        except OSError:
            return None
        if _is_its_process(entry):
            return cls(entry, registry, pidfd)
        os.close(pidfd)
        return None

    async def ended(self) -> int | None:
        """See `WorkerProcesses.ended`."""
        return await asyncio.shield(self._ended)

    async def end(self, *, grace_s: float) -> int | None:
        """See `WorkerProcesses.end`."""
        try:
            if grace_s:
                self._signal(END_SIGNAL)
                await asyncio.wait({self._ended}, timeout=grace_s)
        finally:
            self.kill()
            self._registry.remove(self._entry)
        status = await asyncio.shield(self._ended)
        self._close()
        return status

    def kill(self) -> None:
        """See `WorkerProcesses.kill`."""
        self._signal(signal.SIGKILL)

    def leave(self) -> None:
        """See `WorkerProcesses.leave`. It stays written down."""
        self._loop.remove_reader(self._pidfd)
        self._close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._ended.done():
            self._ended.set_result(self._child.wait() if self._child is not None else None)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
        if self._child is not None and self._child.stdin is not None and self._ended.done():
            self._child.stdin.close()


def _is_its_process(entry: Entry) -> bool:
    """Whether the process of that number is the one that was written down, and has not ended."""
    try:
        command_line = Path(f"/proc/{entry.pid}/cmdline").read_bytes()
        same = (boot_id(), start_ticks(entry.pid)) == (entry.boot_id, entry.start_ticks)
    except (OSError, ValueError, IndexError):
        return False
    # What a file says is believed for our own workers only: as root, we could kill anybody.
    return same and address_of(entry.socket).encode() in command_line.split(b"\0")
