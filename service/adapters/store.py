"""The files of adapters: copies in the data directory, their list, and a directory of the operator's.

    adapter-versions/<number>/    a copy, made by LoadAdapter
    adapters.json                 all versions

All functions block on the disk and raise OSError, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from service import durable_file
from service.adapters.registry import Adapters, AdapterVersion
from service.errors import InvalidArgument
from service.logging import get_logger
from service.uploads import UploadDirectory, UploadedFile

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_CONFIG_BYTES = 1 << 20
_DIRECTORY, _LIST = "adapter-versions", "adapters.json"
_MAX_LIST_BYTES = 64 << 20
_PART_BYTES = 1 << 20
_log = get_logger(__name__)


class AdapterStore:
    """Owner of the copies and of the list."""

    def __init__(self, data_dir: Path | None, max_bytes: int) -> None:
        """`data_dir`: None if nothing outlives the gateway. `max_bytes`: of a file of weights."""
        self._data_dir = data_dir
        self._max_bytes = max_bytes
        self.directory = UploadDirectory(data_dir, _DIRECTORY)

    def path(self, number: int) -> Path:
        return self.directory.path / str(number)

    def copy(self, source: Path, number: int) -> None:
        """Copies an adapter. Raises InvalidArgument, too."""
        for name in FILES:
            with self.open(number, name) as copy:
                try:
                    descriptor = os.open(source / name, os.O_RDONLY | os.O_NONBLOCK)
                except (OSError, ValueError) as error:
                    why = error.strerror if isinstance(error, OSError) else "the path is not valid"
                    raise bad_adapter(f"{name} cannot be read: {why}") from None
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    # `fdopen` would leave that of a directory open.
                    os.close(descriptor)
                    raise bad_adapter(f"{name} is not a regular file")
                with os.fdopen(descriptor, "rb") as file:
                    while part := file.read(_PART_BYTES):
                        copy.write(part)

    def open(self, number: int, name: str) -> UploadedFile:
        """A file of a version's copy, to be written."""
        max_bytes = MAX_CONFIG_BYTES if name == CONFIG else self._max_bytes
        return UploadedFile(self.path(number) / name, max_bytes, bad_adapter)

    def remove(self, number: int) -> None:
        """Removes the copy of a version, if there is one. Never raises."""
        shutil.rmtree(self.path(number), ignore_errors=True)

    def write_list(self, adapters: Adapters) -> None:
        """Stores all versions, for the next gateway. Nobody may change them meanwhile."""
        if self._data_dir is not None:
            versions = [asdict(version) for version in adapters]
            content = {"last_number": adapters.last_number, "versions": versions}
            durable_file.write(self._data_dir / _LIST, json.dumps(content))

    def read_list(self) -> tuple[list[AdapterVersion], int]:
        """What was stored last. Copies that are not in it are leftovers. Raises nothing."""
        if self._data_dir is None:
            return [], 0
        versions: list[AdapterVersion] = []
        last_number = 0
        try:
            with (self._data_dir / _LIST).open("rb") as file:
                content = json.loads(file.read(_MAX_LIST_BYTES))
            versions = [AdapterVersion(**fields) for fields in content["versions"]]
            last_number = int(content["last_number"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            _log.error("cannot read which adapters there are", error=repr(error))
            return [], 0
        self.directory.keep_only({str(version.number) for version in versions})
        return versions, last_number


def identity(directory: Path) -> str:
    """Differs if a file is written to or replaced. As `identity` in workers/adapters/adapter.py."""
    stats = [(directory / name).stat() for name in FILES]
    return ".".join(f"{one.st_ino:x}-{one.st_size:x}-{one.st_mtime_ns:x}" for one in stats)


def scan(directory: Path) -> dict[str, str] | None:
    """The identity of each adapter in a directory, by name. None: it cannot be read. Raises nothing."""
    found = {}
    try:
        for entry in directory.iterdir():
            # What is no adapter, or not complete yet, is left out.
            with contextlib.suppress(OSError):
                found[entry.name] = identity(entry)
    except OSError as error:
        _log.warning("cannot read the directory of adapters", error=error.strerror)
        return None
    return found


def ignored(directory: Path, found: Mapping[str, str]) -> dict[str, str]:
    """Why subdirectories are no adapters, by name. `found`: what `scan` has found. Raises nothing."""
    reasons = {}
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if entry.name in found or not entry.is_dir():
                continue
            missing = [name for name in FILES if not (entry / name).exists()]
            reasons[entry.name] = f"it has no {' and no '.join(missing)}" if missing else "it cannot be read"
    return reasons


def bad_adapter(why: str) -> InvalidArgument:
    """The files are not an adapter that can be served. `why` has no paths of this machine."""
    return InvalidArgument("BAD_ADAPTER", "source", why)
