"""Launcher of workers as local processes. It also adopts those of earlier gateways with this data directory.

They dial this gateway's Unix socket, and that of the next one when this one is gone. With an orphan grace,
workers outlive the gateway for that time. Without one, or where the system does not support it, they end with
it. See `worker_directory` for how the next gateway finds their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.listening import CannotListen
from service.logging import get_logger
from service.pool.launcher import PoolFailed
from service.pool.process import LocalProcess, can_watch, find_process
from service.pool.worker_directory import Epochs, WorkerDirectory, WorkerFile, in_thread
from service.pool.worker_port import NamedWorker, WorkerPort
from service.temporary_directory import TemporaryDirectory
from workers.common import child_process, worker_pb2
from workers.common.addresses import UNIX
from workers.common.code import worker_code
from workers.common.protocol import PROTOCOL, without

_log = get_logger(__name__)

_SPIN_COUNT = "20000"
# How long `start` waits for the exit of workers that were not adopted.
_KILL_TIMEOUT_S = 5.0
# Fields of a worker's config that do not affect what it computes.
_NOT_COMPARED = ("log_level", "model_was_proved")


class LocalLauncher:
    """Owner of `workers/` in `data_dir`, or in a temporary directory that `close` removes."""

    def __init__(self, data_dir: Path | None, orphan_grace_s: float, gpus: Sequence[str] = ()) -> None:
        """Without a `data_dir` no later gateway can find the workers.

        `gpus`: for the workers, one after the other. Those beyond see all GPUs.
        """
        self._gpus = gpus
        self._data_dir = data_dir
        self._can_watch = can_watch()
        # How long workers outlive this gateway; 0: they end with it.
        self._grace_s = orphan_grace_s
        # Set by `adopt`.
        self._directory: WorkerDirectory
        self._epochs: Epochs
        self._port: WorkerPort
        self._gateway_id = ""
        self._opened = contextlib.ExitStack()
        # Workers that were not adopted, until they have exited.
        self._stopping: list[asyncio.Task[int | None]] = []

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, LocalProcess]:
        files = self._open()
        for file in files:
            self._epochs.continue_after(file.epoch)
        wanted = {config.worker_id: (config, settings_of(config, self.assign(config))) for config in configs}
        adopted: dict[str, LocalProcess] = {}
        code = await self._worker_code() if files else ""
        for file in sorted(files, key=lambda file: file.epoch, reverse=True):
            found = find_process(file) if self._can_watch else None
            if found is None:
                self._directory.remove(file)
                continue
            config, settings = wanted.get(file.worker_id, (worker_pb2.WorkerConfig(), ""))
            fits = file.settings == settings and file.worker_id not in adopted
            epoch = await self._epochs.next() if fits else file.epoch
            process = LocalProcess(
                found[0],
                self._endpoint(file, epoch, config),
                functools.partial(self._directory.remove, file),
                pidfd=found[1],
                is_outdated=file.code != code,
            )
            if fits:
                adopted[file.worker_id] = process
            else:
                _log.info("stopping a worker of an earlier gateway", worker_id=file.worker_id, pid=found[0])
                self._stopping.append(asyncio.create_task(process.stop(grace_s=0)))
        return adopted

    def _open(self) -> list[WorkerFile]:
        """Opens the directory and its socket. Without those of `data_dir`, workers end with this gateway.

        Returns the files of workers of earlier gateways. Raises PoolFailed.
        """
        if self._grace_s and not self._can_watch:
            self._warn_of_grace("this system cannot watch processes of another gateway")
        try:
            if self._data_dir is not None:
                return self._use(self._data_dir)
        except (OSError, ValueError, CannotListen) as error:
            self._opened.close()
            self._warn_of_grace(str(error))
        try:
            temporary = TemporaryDirectory()
            self._opened.callback(temporary.close)
            return self._use(temporary.path)
        except (OSError, ValueError, CannotListen) as error:
            raise PoolFailed(f"workers need a socket in the temporary directory: {error}") from None

    def _warn_of_grace(self, why: str) -> None:
        if self._grace_s:
            _log.warning("orphan_grace_s has no effect: workers will end with this gateway", error=why)
        else:
            _log.warning("the socket for workers is in the temporary directory", error=why)
        self._grace_s = 0.0

    def _use(self, place: Path) -> list[WorkerFile]:
        """Raises OSError, ValueError or CannotListen."""
        self._directory = directory = WorkerDirectory(place)
        self._epochs = Epochs(directory)
        self._opened.callback(directory.close)
        last_epoch, self._gateway_id = directory.begin()
        self._epochs.continue_after(last_epoch)
        # Only this user can connect, and only gateways of this directory know the id.
        self._port = WorkerPort(f"{UNIX}{directory.socket}", None, self._gateway_id.encode())
        self._port.join(self._gateway_id)
        self._opened.callback(directory.socket.unlink, missing_ok=True)
        self._opened.callback(self._port.leave, self._gateway_id)
        return directory.workers()

    async def start(self, config: worker_pb2.WorkerConfig) -> LocalProcess:
        """Starts a process. Raises OSError."""
        if not self._grace_s:
            config.orphan_grace_s = 0
        own = self.assign(config)
        epoch = await self._epochs.next()
        if self._stopping:
            # Stopping processes may hold memory that this worker needs.
            await asyncio.wait(self._stopping, timeout=_KILL_TIMEOUT_S)
        self._open_again()
        # Read before it starts: if an upgrade comes between, the next gateway replaces the worker.
        code = await self._worker_code() if self._grace_s else ""
        file = self._directory.add(f"{config.worker_id}-{epoch}", settings_of(config, own), code)
        try:
            return self._start(file, self._endpoint(file, epoch, config), config, own)
        except OSError:
            self._directory.remove(file)
            raise

    def _open_again(self) -> None:
        """Makes the directory and the socket again if somebody has removed them. Raises OSError."""
        self._directory.open()
        if not self._directory.socket.exists():
            self._directory.gateway_id(self._gateway_id)
            self._port.leave(self._gateway_id)
            try:
                self._port.join(self._gateway_id)
            except CannotListen as error:
                raise OSError(0, error.why, error.listen) from None

    def assign(self, config: worker_pb2.WorkerConfig) -> Sequence[str]:
        """The GPUs of a worker's own; empty: it sees all. Writes its index among what it sees."""
        ranks = max(1, config.tensor_parallel)
        own = self._gpus[config.device_index * ranks :][:ranks]
        if len(own) < ranks:
            return ()
        config.device_index = 0
        return own

    def _endpoint(self, file: WorkerFile, epoch: int, config: worker_pb2.WorkerConfig) -> NamedWorker:
        # Without a silence_timeout_s: the end of this process ends the stream, and a pause does not.
        lease = worker_pb2.Lease(gateway_id=self._gateway_id, epoch=epoch, config=config)
        return NamedWorker(self._port, file.name, lease)

    async def _worker_code(self) -> str:
        """Empty if it cannot be read, as while files are being replaced: that differs from any."""
        try:
            return await in_thread(worker_code)
        except OSError as error:
            _log.warning("cannot read the code of workers", file=error.filename, error=error.strerror)
            return ""

    def _start(
        self, file: WorkerFile, endpoint: NamedWorker, config: worker_pb2.WorkerConfig, own: Sequence[str]
    ) -> LocalProcess:
        """Raises OSError."""
        # Not asyncio's subprocess, which kills its processes when the event loop is closed.
        child = subprocess.Popen(  # noqa: S603 - our own program
            _command(self._directory.socket, file, config),
            # The worker exits when this pipe closes, so it cannot outlive the gateway, unless its lease has a
            # grace. Without a lease it has no memory of a GPU.
            stdin=subprocess.PIPE,
            bufsize=0,
            cwd=child_process.DIRECTORY,
            env=_environment(own),
            start_new_session=self._grace_s > 0,
        )
        on_stopped = functools.partial(self._directory.remove, file)
        try:
            return LocalProcess(child.pid, endpoint, on_stopped, child=child)
        except RuntimeError as error:
            # No thread can be started that would wait for it.
            child.kill()
            child.communicate()
            raise OSError(errno.EAGAIN, str(error)) from None

    def close(self) -> None:
        """Unlocks the directory, or removes it if it is temporary."""
        self._opened.close()


def settings_of(config: worker_pb2.WorkerConfig, own: Sequence[str]) -> str:
    """A digest of what decides what a worker computes, and of how it is spoken to. `own`: its GPUs."""
    digest = hashlib.blake2b(PROTOCOL.encode(), digest_size=16)
    digest.update(",".join(own).encode())
    digest.update(without(config, _NOT_COMPARED).SerializeToString(deterministic=True))
    return digest.hexdigest()


def _command(socket: Path, file: WorkerFile, config: worker_pb2.WorkerConfig) -> list[str]:
    command = [sys.executable, "-m", "workers.__main__", "--gateway", f"{UNIX}{socket}"]
    return [*command, "--name", file.name, "--lock", str(file.path), "--log-level", config.log_level]


def _environment(own: Sequence[str]) -> dict[str, str]:
    """The gateway's environment and import path: the worker runs in another directory. `own`: its GPUs."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = child_process.import_path()
    # How long idle compute threads spin. With the default they keep the cores busy between two steps, so that
    # the gateway and its clients wait; see docs/reports/performance.md.
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    if own:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environment
