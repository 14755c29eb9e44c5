"""Launcher of workers as local processes. It also adopts those of earlier gateways with this data directory.

With an orphan grace, workers outlive the gateway for that time, and the registry names them to the next
gateway. Without one, or where the system does not support it, workers end with the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from google.protobuf import json_format
from quire.v1 import worker_pb2

from service.logging import get_logger
from service.pool.gpus import Gpu
from service.pool.process import LocalProcess, boot_id, can_watch, start_ticks
from service.pool.registry import Epochs, Registry, RegistryEntry
from service.pool.threads import in_thread
from workers.common import child_process
from workers.common.code import worker_code
from workers.common.protocol import PROTOCOL, SECRET_VARIABLE, without

_log = get_logger(__name__)

_SPIN_COUNT = "20000"
_SECRET_BYTES = 32
# Prefix of the directory of a gateway without a `data_dir`; a random part follows.
_TEMPORARY_PREFIX = "quire-workers-"
# How long `start` waits for the exit of workers that were not adopted.
_KILL_TIMEOUT_S = 5.0
# Fields of a worker's config that do not affect what it computes.
_NOT_COMPARED = ("log_level", "log_format", "model_was_proved")


class LocalLauncher:
    """Owner of the registry in `data_dir`, or in a temporary directory that `close` removes."""

    def __init__(
        self,
        data_dir: Path | None,
        orphan_grace_s: float,
        on_locked: Callable[[], None] = lambda: None,
        gpus: Sequence[Gpu] = (),
    ) -> None:
        """Without a `data_dir` no later gateway can find the workers.

        `on_locked`: called in a thread when no other gateway has `data_dir`. It raises nothing.
        `gpus`: for the workers, one after the other. Those beyond see all GPUs.
        """
        self._gpus = gpus
        self._temporary: Path | None = None
        if data_dir is None:
            name = f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}"
            data_dir = self._temporary = Path(tempfile.gettempdir()) / name
        self._registry = Registry(data_dir)
        self._on_locked = on_locked
        self._can_watch = can_watch()
        # How long workers outlive this gateway; 0: they end with it.
        self._grace_s = orphan_grace_s
        self._epochs = Epochs(self._registry)
        # Workers that were not adopted, until they have exited.
        self._stopping: list[asyncio.Task[int | None]] = []

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, LocalProcess]:
        entries = await self._open()
        for wanted_config in configs:
            self.assign(wanted_config)
        wanted = {config.worker_id: config for config in configs}
        adopted: dict[str, LocalProcess] = {}
        code = await self._worker_code() if entries else ""
        for entry in sorted(entries, key=lambda entry: entry.epoch, reverse=True):
            process = LocalProcess.attach(entry, self._registry.remove)
            config = wanted.get(entry.worker_id)
            if process is None:
                self._registry.remove(entry)
            elif config is None or entry.worker_id in adopted or not _is_compatible(entry, config):
                _log.info("stopping a worker of an earlier gateway", worker_id=entry.worker_id, pid=entry.pid)
                self._stopping.append(asyncio.create_task(process.stop(grace_s=0)))
            else:
                process.is_outdated = entry.code != code
                adopted[entry.worker_id] = process
        return adopted

    async def _open(self) -> list[RegistryEntry]:
        """Opens the registry and returns its entries. Without a registry, workers end with this gateway."""
        if self._temporary is not None:
            _remove_stale_directories(self._temporary.parent)
        try:
            await self._registry.wait_open()
            await in_thread(self._on_locked)
            self._epochs.continue_after(self._registry.last_epoch())
            if not self._can_watch:
                raise OSError(0, "this system cannot watch processes of another gateway")
            entries = self._registry.read()
        except OSError as error:
            if self._grace_s:
                event = "orphan_grace_s has no effect: workers will end with this gateway"
                _log.warning(event, error=error.strerror)
            elif not self._registry.is_open:
                _log.warning("worker sockets are created in the temporary directory", error=error.strerror)
            self._grace_s = 0.0
            return []
        for entry in entries:
            self._epochs.continue_after(entry.epoch)
        return entries

    async def start(self, config: worker_pb2.WorkerConfig) -> LocalProcess:
        """Starts a process. Raises OSError."""
        cores = self.assign(config)
        epoch = await self._epochs.next()
        if self._stopping:
            # They may hold memory that this worker needs.
            await asyncio.wait(self._stopping, timeout=_KILL_TIMEOUT_S)
        if not self._grace_s:
            config.orphan_grace_s = 0
        # Read before it starts: if an upgrade comes between, the next gateway replaces the worker.
        code = await self._worker_code() if self._grace_s else ""
        # Each incarnation has its own socket name, so an old one can never answer on a new one's socket.
        socket = str(self._registry.socket_path(f"{config.worker_id}-{epoch}"))
        process = self._start(config, epoch, socket, code)
        if cores:
            # It has one thread at this moment; those that it starts inherit this.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores)
        return process

    def assign(self, config: worker_pb2.WorkerConfig) -> set[int]:
        """Writes a worker's own GPUs into its config. Returns the usable cores near them."""
        ranks = max(1, config.tensor_parallel)
        own = self._gpus[config.device_index * ranks :][:ranks]
        if len(own) < ranks:
            return set()
        config.device += ":" + ",".join(gpu.uuid for gpu in own)
        config.device_index = 0
        return set().union(*(gpu.cores for gpu in own)) & os.sched_getaffinity(0)

    async def _worker_code(self) -> str:
        """Empty if it cannot be read, as while files are being replaced: that differs from any."""
        try:
            return await in_thread(worker_code)
        except OSError as error:
            _log.warning("cannot read the code of workers", file=error.filename, error=error.strerror)
            return ""

    def _start(self, config: worker_pb2.WorkerConfig, epoch: int, socket: str, code: str) -> LocalProcess:
        """Raises OSError."""
        secret = secrets.token_hex(_SECRET_BYTES)
        # Not asyncio's subprocess, which kills its processes when the event loop is closed.
        child = subprocess.Popen(  # noqa: S603 - our own program
            _command(socket, config),
            # The worker exits when this pipe closes, so it cannot outlive the gateway, unless it has read a
            # newline from the pipe: then it is in the registry.
            stdin=subprocess.PIPE,
            bufsize=0,
            cwd=child_process.DIRECTORY,
            env=_environment(secret),
            start_new_session=self._grace_s > 0,
        )
        try:
            boot, ticks = (boot_id(), start_ticks(child.pid)) if self._grace_s else ("", 0)
            entry = RegistryEntry(
                config.worker_id, epoch, child.pid, boot, ticks, socket, secret, config, code=code
            )
            pidfd = os.pidfd_open(child.pid) if self._can_watch else -1
        except OSError:
            child.kill()
            child.communicate()
            raise
        if self._grace_s:
            self._register(entry, child)
        return LocalProcess(entry, self._registry.remove, pidfd=pidfd, child=child)

    def _register(self, entry: RegistryEntry, child: subprocess.Popen[bytes]) -> None:
        """Writes the entry and tells the worker that it can outlive this gateway."""
        assert child.stdin is not None
        try:
            self._registry.write(entry)
            child.stdin.write(b"\n")
        except OSError as error:
            _log.warning(
                "a worker will end with this gateway", worker_id=entry.worker_id, error=error.strerror
            )

    def close(self) -> None:
        """Unlocks the registry, or removes it if it is temporary."""
        self._registry.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _remove_stale_directories(parent: Path) -> None:
    """Removes temporary directories of this user that no running gateway has locked."""
    for path in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        registry = Registry(path)
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
                registry.open()
                shutil.rmtree(path, ignore_errors=True)
        registry.close()


def _is_compatible(entry: RegistryEntry, config: worker_pb2.WorkerConfig) -> bool:
    """Whether a worker was started with the protocol and config that would be used now."""
    return entry.protocol == PROTOCOL and without(entry.config, _NOT_COMPARED) == without(
        config, _NOT_COMPARED
    )


def _command(socket: str, config: worker_pb2.WorkerConfig) -> list[str]:
    command = [sys.executable, "-m", "workers.__main__", "--socket", socket]
    return [*command, "--config", json_format.MessageToJson(config, indent=None)]


def _environment(secret: str) -> dict[str, str]:
    """The gateway's environment and import path: the worker runs in another directory."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = child_process.import_path()
    environment[SECRET_VARIABLE] = secret
    # How long idle compute threads spin. With the default they keep the cores busy between two steps, so that
    # the gateway and its clients wait; see docs/performance.md.
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
