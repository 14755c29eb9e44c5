"""The directory `workers/` of a data directory: what its gateways, one after the other, know of workers.

    gateway.sock        what workers of this machine dial
    worker-0-17.lock    a worker that was started here. It has a lock on this file as long as it runs, by
                        which the next gateway finds the process; the content says what it was started as
    epoch               the highest epoch that was ever used in this directory
    gateway-id          how workers know the gateways of this directory

A gateway locks the directory itself, which only this user can write to. An invalid file is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from service import durable_file
from service.logging import get_logger
from service.temporary_directory import locked
from workers.common.trusted import make_private, open_regular

_log = get_logger(__name__)

_MAX_FILE_BYTES = 256
_MAX_EPOCH = 1 << 53
_ID_BYTES = 16
_LOCK_NAME = re.compile(r"(?P<worker_id>.{1,64})-(?P<epoch>[1-9][0-9]{0,15})\.lock", re.ASCII)
# C's `struct flock`: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_Result = TypeVar("_Result")
# What starts workers has threads of its own, which only wait for the disk: a restart waits for no upload,
# download or text of callers.
_THREADS = ThreadPoolExecutor(4, "pool")


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """The file of a worker that was started here."""

    path: Path
    worker_id: str
    # The epoch of its start. Later gateways have given it others.
    epoch: int
    # Digests of its configuration, and of the code that it was started from.
    settings: str
    code: str

    @property
    def name(self) -> str:
        return self.path.stem


class WorkerDirectory:
    """Owner of the directory while it is open. Methods raise OSError unless documented otherwise."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir.resolve() / "workers"
        self._lock = -1

    def open(self) -> None:
        """Creates the directory if necessary, and locks it. BlockingIOError: another gateway holds it."""
        if self._has_path():
            return
        self.close()
        make_private(self.path)
        self._lock = locked(self.path)
        os.fchmod(self._lock, 0o700)

    def begin(self) -> tuple[int, str]:
        """Opens the directory. Returns the highest epoch that was used here, and the gateway's id.

        Raises OSError or ValueError.
        """
        self.open()
        return self.last_epoch(), self.gateway_id()

    @property
    def is_open(self) -> bool:
        return self._lock >= 0

    def _has_path(self) -> bool:
        """Whether the locked directory is still the one at the path."""
        with contextlib.suppress(FileNotFoundError):
            return self.is_open and os.path.samestat(os.fstat(self._lock), self.path.lstat())
        return False

    def close(self) -> None:
        """Unlocks the directory. Its files stay."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    @property
    def socket(self) -> Path:
        return self.path / "gateway.sock"

    def add(self, name: str, settings: str, code: str) -> WorkerFile:
        """Writes the file of a worker that is about to be started."""
        path = self.path / f"{name}.lock"
        durable_file.write(path, f"{settings}\n{code}\n", sync=False)
        return _read_worker_file(path)

    def workers(self) -> list[WorkerFile]:
        """The files of all workers. Removes those that are invalid."""
        found = []
        for path in list(self.path.iterdir()):
            if path.suffix == ".lock":
                try:
                    found.append(_read_worker_file(path))
                    continue
                except (OSError, ValueError) as error:
                    _log.warning("removing an invalid worker file", path=str(path), error=str(error))
            elif path.suffix != ".tmp":
                continue
            _remove(path)
        return found

    def remove(self, worker: WorkerFile) -> None:
        """Removes the file of a worker that has ended. Raises nothing."""
        _remove(worker.path)

    def last_epoch(self) -> int:
        """The highest epoch that was ever used here; 0 if it cannot be read. Raises nothing."""
        path = self.path / "epoch"
        try:
            number = int(_read(path))
            if not 0 <= number < _MAX_EPOCH:
                raise ValueError(f"{number} is no epoch")
            return number
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            _log.warning("cannot read the last epoch", path=str(path), error=str(error))
            _remove(path)
            return 0

    def gateway_id(self, new: str = "") -> str:
        """The id that all gateways of this directory have, one after the other. `new`: if there is none."""
        path = self.path / "gateway-id"
        with contextlib.suppress(FileNotFoundError):
            # A crash of the system may have left it empty. No worker knows such a gateway.
            if known := _read(path):
                return known
        durable_file.write(path, new or secrets.token_hex(_ID_BYTES))
        return _read(path)

    def write_epoch(self, epoch: int) -> None:
        """Makes the highest used epoch durable. Blocks on the disk."""
        durable_file.write(self.path / "epoch", str(epoch))


async def in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Calls a function that blocks on the disk."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)


class Epochs:
    """Owner of the counter of incarnations. It is durable if the directory is open."""

    def __init__(self, directory: WorkerDirectory | None) -> None:
        self._directory = directory
        # The highest one so far.
        self.last = 0
        self._lock = asyncio.Lock()

    def continue_after(self, epoch: int) -> None:
        """The next one is higher than this."""
        self.last = max(self.last, epoch)

    async def next(self) -> int:
        """A new epoch, which is durable if the disk allows. Raises nothing."""
        self.last += 1
        epoch = self.last
        if self._directory is not None and self._directory.is_open:
            # One write at a time, so that the highest epoch is written last.
            async with self._lock:
                await in_thread(self._write, self._directory)
        return epoch

    def _write(self, directory: WorkerDirectory) -> None:
        try:
            directory.open()
            directory.write_epoch(self.last)
        except OSError as error:
            _log.warning("cannot store the epoch", epoch=self.last, error=error.strerror)


def lock_holder(path: Path) -> int:
    """The pid of the process that has a lock on a file; 0: none that is seen from here. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    finally:
        os.close(descriptor)
    # Negative for a process of another host, on a file system of several.
    return 0 if kind == fcntl.F_UNLCK else max(0, pid)


def _read_worker_file(path: Path) -> WorkerFile:
    """Raises OSError or ValueError."""
    settings, code, rest = _read(path).split("\n")
    name = _LOCK_NAME.fullmatch(path.name)
    if name is None or rest:
        raise ValueError("it is no file of a worker")
    return WorkerFile(path, name["worker_id"], int(name["epoch"]), settings, code)


def _read(path: Path) -> str:
    """Raises OSError or ValueError."""
    with open_regular(path, follow=False) as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError("it is too large")
    return content.decode()


def _remove(path: Path) -> None:
    """Removes a file, link or directory. Raises nothing."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        # Left there, it would be warned of at each start.
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        _log.warning("cannot remove a file of a worker", path=str(path), error=error.strerror)
