"""Registry of running workers for the next gateway: the directory `workers/` in the data directory.

    worker-0-17.json   one incarnation: its process, its socket, its secret and its config
    worker-0-17.sock   its socket, unless the path is too long for a socket
    epoch              the highest epoch that was ever used in this directory
    gateway-id         how workers of other hosts know the gateways of this directory

Files are checked before use. A file that is invalid, or is not a private file of this user, is removed.
Whether a process still runs is checked in `process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from quire.v1 import worker_pb2

from service import durable_file
from service.logging import get_logger
from service.pool.threads import in_thread
from service.setting_rules import MAX_SOCKET_PATH_BYTES
from workers.common.protocol import PROTOCOL
from workers.common.trusted import require_trusted

_log = get_logger(__name__)

# How long `wait_open` waits.
_LOCK_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.05
# Prefix of the directory of a socket whose path would be too long here.
_PREFIX = "quire-worker-"
_MAX_ENTRY_BYTES = 64 << 10
_MAX_EPOCH_BYTES = 32
_MAX_EPOCH = 1 << 53
_MAX_PID = 1 << 31


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One incarnation."""

    worker_id: str
    epoch: int
    pid: int
    # These two distinguish the process from later ones with the same pid, also after a reboot.
    boot_id: str
    start_ticks: int
    # Path of the socket.
    socket: str
    secret: str
    config: worker_pb2.WorkerConfig
    protocol: str = PROTOCOL
    # Digest of the code that it was started with; see `worker_code`. Empty: its version wrote none.
    code: str = ""

    @property
    def name(self) -> str:
        """Name of its files without the suffix."""
        return f"{self.worker_id}-{self.epoch}"


class Registry:
    """Owner of the directory while it is open. Methods raise OSError unless documented otherwise."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir.resolve() / "workers"
        self._lock = -1

    def open(self) -> None:
        """Creates the directory if necessary, and locks it. BlockingIOError: another gateway holds it."""
        if self._has_path():
            return
        self.close()
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(self._lock).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(self._path))
            os.fchmod(self._lock, 0o700)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BlockingIOError(errno.EAGAIN, "another gateway has it", str(self._path)) from None
        except OSError:
            self.close()
            raise

    async def wait_open(self) -> None:
        """Opens the directory, and waits a moment for the lock of a gateway that was just killed."""
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self.open()
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_LOCK_POLL_S)

    @property
    def is_open(self) -> bool:
        return self._lock >= 0

    def _has_path(self) -> bool:
        """Whether the locked directory is still the one at the path."""
        with contextlib.suppress(FileNotFoundError):
            return self.is_open and os.path.samestat(os.fstat(self._lock), self._path.lstat())
        return False

    def close(self) -> None:
        """Unlocks the directory. Its files stay."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def socket_path(self, name: str) -> Path:
        """Path for a new socket: here, or else in a new temporary directory."""
        path = self._path / f"{name}.sock"
        if self._has_path() and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        require_trusted(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=_PREFIX)) / f"{name}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            path.parent.rmdir()
            raise OSError(errno.ENAMETOOLONG, "the path is too long for a socket", str(path))
        return path

    def read(self) -> list[RegistryEntry]:
        """All valid entries. Removes invalid entries, and sockets that belong to no entry."""
        entries = []
        for path in list(self._path.iterdir()):
            if path.suffix == ".json":
                try:
                    entries.append(_read_entry(path))
                    continue
                except (OSError, ValueError, TypeError, RecursionError, json_format.ParseError) as error:
                    _log.warning("removing an invalid worker entry", path=str(path), error=str(error))
            elif path.suffix != ".tmp":
                continue
            _remove(path)
        sockets = {entry.socket for entry in entries}
        for path in list(self._path.glob("*.sock")):
            if str(path) not in sockets:
                _remove(path)
        return entries

    def write(self, entry: RegistryEntry) -> None:
        content = {name: getattr(entry, name) for name in RegistryEntry.__slots__ if name != "config"}
        content["config"] = json_format.MessageToDict(entry.config)
        durable_file.write(self._path / f"{entry.name}.json", json.dumps(content), sync=False)

    def remove(self, entry: RegistryEntry) -> None:
        """Removes the entry and the socket of an incarnation. Raises nothing."""
        _remove(self._path / f"{entry.name}.json")
        remove_socket(entry.socket)

    def last_epoch(self) -> int:
        """The highest epoch that was ever used here; 0 if it cannot be read. Raises nothing."""
        path = self._path / "epoch"
        try:
            number = int(_read(path, _MAX_EPOCH_BYTES))
            if not 0 <= number < _MAX_EPOCH:
                raise ValueError(f"{number} is no epoch")
            return number
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            _log.warning("cannot read the last epoch", path=str(path), error=str(error))
            _remove(path)
            return 0

    def gateway_id(self) -> str:
        """The id that all gateways of this directory have, one after the other."""
        path = self._path / "gateway-id"
        with contextlib.suppress(FileNotFoundError):
            return _read(path, _MAX_EPOCH_BYTES)
        durable_file.write(path, secrets.token_hex(_MAX_EPOCH_BYTES // 2))
        return _read(path, _MAX_EPOCH_BYTES)

    def write_epoch(self, epoch: int) -> None:
        """Makes the highest used epoch durable. Blocks on the disk."""
        durable_file.write(self._path / "epoch", str(epoch))


class Epochs:
    """Owner of the counter of incarnations. It is durable if the registry is open."""

    def __init__(self, registry: Registry | None) -> None:
        self._registry = registry
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
        if self._registry is not None and self._registry.is_open:
            # One write at a time, so that the highest epoch is written last.
            async with self._lock:
                await in_thread(self._write, self._registry)
        return epoch

    def _write(self, registry: Registry) -> None:
        try:
            registry.open()
            registry.write_epoch(self.last)
        except OSError as error:
            _log.warning("cannot store the epoch", epoch=self.last, error=error.strerror)


def _read_entry(path: Path) -> RegistryEntry:
    """Raises OSError, ValueError, TypeError, RecursionError or ParseError."""
    content = json.loads(_read(path, _MAX_ENTRY_BYTES))
    if not isinstance(content, dict):
        raise TypeError("it is not an object")
    content.setdefault("code", "")
    for name in RegistryEntry.__slots__:
        wanted = {"config": dict, "epoch": int, "pid": int, "start_ticks": int}.get(name, str)
        if type(content.get(name)) is not wanted:
            raise TypeError(f"{name} is not a {wanted.__name__}")
    fields = {name: content[name] for name in RegistryEntry.__slots__}
    # A worker of another version may have unknown fields. It is stopped, for which the known ones suffice.
    fields["config"] = json_format.ParseDict(
        content["config"], worker_pb2.WorkerConfig(), ignore_unknown_fields=True
    )
    entry = RegistryEntry(**fields)
    if not (0 < entry.epoch < _MAX_EPOCH and 1 < entry.pid < _MAX_PID):
        raise ValueError("a number is out of range")
    if (path.name, Path(entry.socket).name) != (f"{entry.name}.json", f"{entry.name}.sock"):
        raise ValueError("its content does not match its name")
    if b"\0" in os.fsencode(entry.socket) or not (entry.secret.isalnum() and entry.secret.isascii()):
        raise ValueError("its socket or its secret is invalid")
    return entry


def _read(path: Path, limit_bytes: int) -> str:
    """Reads a small private file of this user. Raises OSError or ValueError."""
    # O_NONBLOCK: opening a named pipe must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a private file of this user", str(path))
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError("it is too large")
    return content.decode()


def remove_socket(socket: str) -> None:
    """Removes a socket, and its directory if that was made for it alone. Raises nothing."""
    path = Path(socket)
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    if path.parent.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _remove(path: Path) -> None:
    """Removes a file, link or directory. Raises nothing."""
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        _log.warning("cannot remove a file of the worker registry", path=str(path), error=error.strerror)
