"""Which workers a gateway has running, written down for the one after it: `workers/` in the data directory.

    worker-0-17.json   one incarnation: its process, its socket, the secret to show, what it was started with
    worker-0-17.sock   its socket, if the path is not too long for one
    epoch              the highest epoch that was ever given here

Nothing that lies there is trusted before it was looked at: what cannot be read, or was not written by this
user for himself, is removed. It knows nothing of processes but what was written of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from quire.v1 import types_pb2, worker_pb2

from service.logging import get_logger
from service.pool.directory import MAX_SOCKET_PATH_BYTES, is_locked_by

_log = get_logger(__name__)

# Of the directory of a socket that has no room here.
_PREFIX = "quire-worker-"
_MAX_ENTRY_BYTES = 64 << 10
_MAX_EPOCH_BYTES = 32
_MAX_EPOCH = 1 << 53
_MAX_PID = 1 << 31
# What a gateway and its workers have to agree on to understand each other.
PROTOCOL = hashlib.blake2b(
    worker_pb2.DESCRIPTOR.serialized_pb + types_pb2.DESCRIPTOR.serialized_pb, digest_size=16
).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One incarnation."""

    worker_id: str
    epoch: int
    pid: int
    # By these two a process is known from later ones with its number, also when the machine was started anew.
    boot_id: str
    start_ticks: int
    # Where it listens: a path.
    socket: str
    secret: str
    config: worker_pb2.WorkerConfig
    protocol: str = PROTOCOL

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.worker_id}-{self.epoch}"


class Registry:
    """Owner of the directory while it is open. Methods raise OSError where nothing else is said."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir.resolve() / "workers"
        self._lock = -1

    def open(self) -> None:
        """Makes the directory if it is not there, and locks it. BlockingIOError: another gateway has it."""
        if self._lock >= 0 and is_locked_by(self._lock, self._path):
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

    def close(self) -> None:
        """Lets others have the directory. What is written there stays."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def socket_path(self, name: str) -> Path:
        """Where a socket goes: here, or in a directory of its own where the path is short enough."""
        path = self._path / f"{name}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        return Path(tempfile.mkdtemp(prefix=_PREFIX)) / f"{name}.sock"

    def read(self) -> list[Entry]:
        """All incarnations that were written down. Removes every file that is none of theirs."""
        entries = []
        for path in list(self._path.iterdir()):
            if path.suffix == ".json":
                try:
                    entries.append(_read_entry(path))
                    continue
                except (OSError, ValueError, TypeError, RecursionError, json_format.ParseError) as error:
                    _log.warning("an entry of a worker cannot be used", path=str(path), error=str(error))
            elif path.suffix != ".tmp":
                continue
            _remove(path)
        sockets = {entry.socket for entry in entries}
        for path in list(self._path.glob("*.sock")):
            if str(path) not in sockets:
                _remove(path)
        return entries

    def write(self, entry: Entry) -> None:
        """Writes an incarnation down: all of it, or nothing."""
        content = {name: getattr(entry, name) for name in Entry.__slots__ if name != "config"}
        content["config"] = json_format.MessageToDict(entry.config)
        self._replace(f"{entry.name}.json", json.dumps(content))

    def remove(self, entry: Entry) -> None:
        """Forgets an incarnation that has ended, and removes its socket. Raises nothing."""
        _remove(self._path / f"{entry.name}.json")
        _remove_socket(Path(entry.socket))

    def last_epoch(self) -> int:
        """The highest epoch that was given here; 0 if that cannot be read. Raises nothing."""
        path = self._path / "epoch"
        try:
            number = int(_read(path, _MAX_EPOCH_BYTES))
            if not 0 <= number < _MAX_EPOCH:
                raise ValueError(f"{number} is no epoch")
            return number
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            _log.warning("the last epoch cannot be read", path=str(path), error=str(error))
            _remove(path)
            return 0

    def note_epoch(self, epoch: int) -> None:
        """Writes down that an epoch is given, so that it lasts. Blocks on the disk."""
        self._replace("epoch", str(epoch), lasting=True)

    def _replace(self, name: str, content: str, *, lasting: bool = False) -> None:
        temporary = self._path / f"{name}.tmp"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(self._path / name)
        if lasting:
            os.fsync(self._lock)


def _read_entry(path: Path) -> Entry:
    """Raises OSError, ValueError, TypeError, RecursionError or ParseError."""
    content = json.loads(_read(path, _MAX_ENTRY_BYTES))
    if not isinstance(content, dict):
        raise TypeError("it is not an object")
    for name in Entry.__slots__:
        wanted = {"config": dict, "epoch": int, "pid": int, "start_ticks": int}.get(name, str)
        if type(content.get(name)) is not wanted:
            raise TypeError(f"{name} is not a {wanted.__name__}")
    fields = {name: content[name] for name in Entry.__slots__}
    # Of another version it may have other fields: such a worker is ended, for which these suffice.
    fields["config"] = json_format.ParseDict(
        content["config"], worker_pb2.WorkerConfig(), ignore_unknown_fields=True
    )
    entry = Entry(**fields)
    if not (0 < entry.epoch < _MAX_EPOCH and 1 < entry.pid < _MAX_PID):
        raise ValueError("a number is out of range")
    if (path.name, Path(entry.socket).name) != (f"{entry.name}.json", f"{entry.name}.sock"):
        raise ValueError("it is not what it is called")
    if b"\0" in os.fsencode(entry.socket) or not (entry.secret.isalnum() and entry.secret.isascii()):
        raise ValueError("its socket or its secret is none")
    return entry


def _read(path: Path, limit_bytes: int) -> str:
    """A small file that this user has written for himself. Raises OSError or ValueError."""
    # Not to wait for the other end of a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a private file of this user", str(path))
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError("it is too large")
    return content.decode()


def _remove_socket(path: Path) -> None:
    """Removes a socket, and the directory that was made for it alone."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    if path.parent.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _remove(path: Path) -> None:
    """Removes whatever it is, if that can be done."""
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        _log.warning("cannot be removed", path=str(path), error=error.strerror)
