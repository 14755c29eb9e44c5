"""Workers as processes on this machine: our children, or those of an earlier gateway on this data directory.

With a grace they outlive the gateway for that long, and are written down for the next one. Without, or where
that cannot be, they end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf import json_format
from quire.v1 import worker_pb2

from service.logging import get_logger
from service.pool.directory import RuntimeDirectory, state_dir
from service.pool.lasting import END_SIGNAL, LastingProcess, address_of, boot_id, can_watch, start_ticks
from service.pool.launcher import Adopted, WorkerProcesses
from service.pool.registry import PROTOCOL, Entry, Registry

_log = get_logger(__name__)

_SPIN_COUNT = "20000"
_SECRET_VARIABLE = "QUIRE_WORKER_SECRET"  # noqa: S105 - a name
_SECRET_BYTES = 32
# How long a killed gateway may take to be gone, with its lock.
_LOCK_PATIENCE_S = 2.0
_LOCK_POLL_S = 0.05
# How long workers that nobody wants may take to die, before others are started beside them.
_KILL_PATIENCE_S = 5.0
# Of a worker's config, what makes no difference to what it computes.
_INDIFFERENT = ("log_level", "log_format", "model_was_proved")


class LocalProcess:
    """A worker of one process, which ends with the gateway."""

    def __init__(self, socket: Path, process: asyncio.subprocess.Process, secret: str) -> None:
        self.address = address_of(str(socket))
        self.pid = process.pid
        self.secret = secret
        self._socket = socket
        self._process = process
        self._ended = asyncio.create_task(process.wait(), name="worker-process")

    async def ended(self) -> int:
        """See `WorkerProcesses.ended`."""
        return await asyncio.shield(self._ended)

    async def end(self, *, grace_s: float) -> int:
        """See `WorkerProcesses.end`. Closing its standard input tells the worker that the gateway is gone."""
        try:
            if grace_s:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(END_SIGNAL)
                await asyncio.wait({self._ended}, timeout=grace_s)
        finally:
            # Also when there is no time to wait: one that hangs does not see that its stream has ended.
            if self._process.stdin is not None:
                self._process.stdin.close()
            self.kill()
        status = await self._ended
        with contextlib.suppress(OSError):
            self._socket.unlink()
        return status

    def kill(self) -> None:
        """See `WorkerProcesses.kill`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def leave(self) -> None:
        """See `WorkerProcesses.leave`. This one cannot: its standard input closes when we end."""


class LocalLauncher:
    """Owner of what lies in `data_dir` (None: the user's state directory): the registry, and the sockets."""

    def __init__(self, data_dir: Path | None, orphan_grace_s: float) -> None:
        home = data_dir if data_dir is not None else state_dir()
        self._directory = RuntimeDirectory(home)
        self._registry = Registry(home)
        self._grace_s = orphan_grace_s
        # Whether the registry is ours.
        self._is_open = False
        self._last_epoch = 0
        self._noting = asyncio.Lock()
        # Ends of workers that nobody wants, under way.
        self._ending: list[asyncio.Task[int | None]] = []

    @property
    def last_epoch(self) -> int:
        """See `Launcher.last_epoch`."""
        return self._last_epoch

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, Adopted]:
        """See `Launcher.adopt`."""
        entries = await self._open()
        wanted = {config.worker_id: config for config in configs}
        adopted: dict[str, Adopted] = {}
        for entry in sorted(entries, key=lambda entry: entry.epoch, reverse=True):
            process = LastingProcess.find(entry, self._registry)
            config = wanted.get(entry.worker_id)
            if process is None:
                self._registry.remove(entry)
            elif config is None or entry.worker_id in adopted or not _agrees(entry, config):
                _log.info("a worker of an earlier gateway is ended", worker_id=entry.worker_id, pid=entry.pid)
                self._ending.append(asyncio.create_task(process.end(grace_s=0)))
            else:
                adopted[entry.worker_id] = Adopted(entry.epoch, process)
        return adopted

    async def _open(self) -> list[Entry]:
        """Reads what is written down. Without a registry workers end with this gateway."""
        try:
            if not can_watch():
                raise OSError(0, "this system cannot watch processes of others")
            await self._lock()
            entries = self._registry.read()
        except OSError as error:
            if self._grace_s:
                _log.warning(
                    "workers will end with this gateway, whatever orphan_grace_s", error=error.strerror
                )
            self._registry.close()
            return []
        self._is_open = True
        self._last_epoch = max([self._registry.last_epoch(), *(entry.epoch for entry in entries)])
        return entries

    async def _lock(self) -> None:
        """Raises OSError."""
        give_up_s = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                self._registry.open()
                return
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_LOCK_POLL_S)

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> WorkerProcesses:
        """Starts a process. Raises OSError."""
        self._last_epoch = max(self._last_epoch, epoch)
        if self._ending:
            # They may have the memory that this one needs.
            await asyncio.wait(self._ending, timeout=_KILL_PATIENCE_S)
        if self._is_open:
            # One after the other, so that the highest stays.
            async with self._noting:
                await asyncio.to_thread(self._note_epoch)
            if self._grace_s:
                return self._start_lasting(config, epoch)
        return await self._start_child(config, epoch)

    def _note_epoch(self) -> None:
        try:
            self._registry.open()
            self._registry.note_epoch(self._last_epoch)
        except OSError as error:
            _log.warning("an epoch cannot be written down", epoch=self._last_epoch, error=error.strerror)

    async def _start_child(self, config: worker_pb2.WorkerConfig, epoch: int) -> LocalProcess:
        """One that ends with us. Raises OSError."""
        config.orphan_grace_s = 0
        # A fresh name for each incarnation: a late one can never answer on a new one's socket.
        socket = self._directory.socket_path(f"{config.worker_id}-{epoch}.sock")
        secret = secrets.token_hex(_SECRET_BYTES)
        process = await asyncio.create_subprocess_exec(
            *_command(str(socket), config),
            # The worker ends when this pipe does, so it cannot outlive the gateway, however that ends.
            stdin=asyncio.subprocess.PIPE,
            cwd="/",
            env=_environment(secret),
        )
        return LocalProcess(socket, process, secret)

    def _start_lasting(self, config: worker_pb2.WorkerConfig, epoch: int) -> LastingProcess:
        """One that outlives us. Raises OSError."""
        socket = str(self._registry.socket_path(f"{config.worker_id}-{epoch}"))
        secret = secrets.token_hex(_SECRET_BYTES)
        # Not asyncio's: that one kills its processes when its loop is closed.
        child = subprocess.Popen(  # noqa: S603 - our own program
            _command(socket, config),
            stdin=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=_environment(secret),
            start_new_session=True,
        )
        try:
            entry = Entry(
                config.worker_id, epoch, child.pid, boot_id(), start_ticks(child.pid), socket, secret, config
            )
            pidfd = os.pidfd_open(child.pid)
        except OSError:
            child.kill()
            child.communicate()
            raise
        self._write_down(entry, child)
        return LastingProcess(entry, self._registry, pidfd, child)

    def _write_down(self, entry: Entry, child: subprocess.Popen[bytes]) -> None:
        """Tells the worker that others can find it. Until then it ends when its standard input does."""
        assert child.stdin is not None
        try:
            self._registry.write(entry)
            child.stdin.write(b"\n")
        except OSError as error:
            _log.warning(
                "a worker will end with this gateway", worker_id=entry.worker_id, error=error.strerror
            )

    def close(self) -> None:
        """Removes the sockets of workers that end with us, and lets others have the registry."""
        self._directory.close()
        self._registry.close()


def _agrees(entry: Entry, config: worker_pb2.WorkerConfig) -> bool:
    """Whether a worker is what would be started now."""
    return entry.protocol == PROTOCOL and _essence(entry.config) == _essence(config)


def _essence(config: worker_pb2.WorkerConfig) -> worker_pb2.WorkerConfig:
    essence = worker_pb2.WorkerConfig()
    essence.CopyFrom(config)
    for name in _INDIFFERENT:
        essence.ClearField(name)
    return essence


def _command(socket: str, config: worker_pb2.WorkerConfig) -> list[str]:
    command = [sys.executable, "-m", "workers", "--listen", address_of(socket)]
    return [*command, "--config", json_format.MessageToJson(config, indent=None)]


def _environment(secret: str) -> dict[str, str]:
    """The gateway's environment, with its import path, since the worker runs in another directory."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    environment[_SECRET_VARIABLE] = secret
    # How long compute threads spin when they have nothing to do. The default is long enough to take the
    # cores from the gateway and its callers between two steps; see docs/performance.md.
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
