"""The files of adapters: copies in the data directory, and a directory of the operator's.

    adapter-versions/<number>/    a copy, made by LoadAdapter

The journal has which versions there are, each as a value, and the last number; with several hosts, neither.

A cache names its adapter by number, and its salt has the digest of the adapter's content (`Tenant.salt`). So
a stored number that caches know with other content is not used for them, and one that is not stored is found
again by the content: among the copies here, or in the operator's directory (`loader`).

All functions block on the disk and raise OSError, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from service.adapters.registry import Adapters, AdapterVersion, check_adapter_id
from service.errors import InvalidArgument
from service.journal.values import StoredValues
from service.logging import get_logger
from service.uploads import UploadDirectory, UploadedFile
from workers.common.adapter_files import CONFIG, FILES, WEIGHTS, content_digest, file_identity

MAX_CONFIG_BYTES = 1 << 20
_DIRECTORY = "adapter-versions"
# Names of values.
_PREFIX, _LAST = "adapters/", "last"
_NUMBER = re.compile(r"[0-9]{1,18}")
_log = get_logger(__name__)


class AdapterStore:
    """Owner of the copies, and of which versions are stored."""

    def __init__(self, data_dir: Path | None, max_bytes: int, values: StoredValues) -> None:
        """`data_dir`: None if nothing outlives the gateway. `max_bytes`: of a file of weights."""
        self._data_dir = data_dir
        self._max_bytes = max_bytes
        self.directory = UploadDirectory(data_dir, _DIRECTORY)
        self._values = values

    def path(self, number: int) -> Path:
        return self.directory.path / str(number)

    def copy(self, source: Path, number: int) -> None:
        """Copies an adapter. Raises InvalidArgument, too."""
        for name in FILES:
            with self.open(number, name) as copy:
                copy.copy(source / name)

    def open(self, number: int, name: str) -> UploadedFile:
        """A file of a version's copy, to be written."""
        max_bytes = MAX_CONFIG_BYTES if name == CONFIG else self._max_bytes
        return UploadedFile(self.path(number) / name, max_bytes, bad_adapter)

    def discard(self, number: int) -> None:
        """Removes what was copied for a number. Never raises."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path(number), ignore_errors=True)

    def remove(self, version: AdapterVersion) -> None:
        """Removes the copy of a version, if its directory is one. Never raises."""
        if not version.identity and Path(version.directory).parent == self.directory.path:
            shutil.rmtree(version.directory, ignore_errors=True)

    async def store(self, adapters: Adapters) -> None:
        """Stores all versions in the journal, for the next gateway. Raises StorageUnavailable."""
        if changes := self._changes(adapters):
            await self._values.set(changes)

    def store_at_start(self, adapters: Adapters) -> None:
        """As `store`, before anything else is committed."""
        for name, value in self._changes(adapters).items():
            self._values.put(name, value)

    def _changes(self, adapters: Adapters) -> dict[str, bytes]:
        """The values that differ from what is stored."""
        if self._data_dir is None:
            return {}
        values = {str(version.number): json.dumps(asdict(version)).encode() for version in adapters}
        if adapters.last_number:
            values[_LAST] = str(adapters.last_number).encode()
        stored = self._values.all(_PREFIX)
        gone = {_PREFIX + name: b"" for name in stored.keys() - values.keys()}
        new = {_PREFIX + name: value for name, value in values.items() if stored.get(name) != value}
        return gone | new

    def stored(self) -> tuple[list[AdapterVersion], int]:
        """All versions that were stored last, and the last number."""
        if self._data_dir is None:
            return [], 0
        stored = self._values.all(_PREFIX)
        last_number = int(stored.pop(_LAST, b"0"))
        versions = [AdapterVersion(**json.loads(stored[name])) for name in sorted(stored, key=int)]
        for version in versions:
            if not version.identity:
                # A copy, which is here wherever the data directory was when it was made.
                version.directory = str(self.directory.path / Path(version.directory).name)
        return versions, last_number

    def recover(self, adapters: Adapters, contents: Mapping[int, str], in_use: Collection[int]) -> None:
        """Adds the versions of an earlier gateway, and removes other copies. Raises nothing.

        contents: digests of adapters of caches, by number. in_use: the numbers of all adapters of caches.
        """
        versions, last_number = self.stored()
        adapters.last_number = max([last_number, self.last_copy(), *contents, *in_use])
        for version in versions:
            version.digest = version.digest or self.digest_of(version)
            number = version.number
            if contents.get(number, version.digest) != version.digest:
                version.number = adapters.last_number = adapters.last_number + 1
                _log.warning(
                    "an adapter gets another number: caches have other content under its own",
                    adapter=version.adapter_id,
                    version=version.number,
                    before=number,
                )
        adapters.update(versions)
        if self._data_dir is not None:
            adapters.update(self._copies_of_caches(adapters, contents))
        self.directory.keep_only({Path(version.directory).name for version in adapters})

    def _copies_of_caches(self, adapters: Adapters, contents: Mapping[int, str]) -> list[AdapterVersion]:
        """Versions that only caches know, and of which there are copies. No id names them."""
        found = []
        for number, digest in contents.items():
            if adapters.get(number) is None:
                path = str(self.path(number))
                version = AdapterVersion(number, "", None, path, retired=True, digest=digest)
                if self.digest_of(version) == digest:
                    found.append(version)
        return found

    def last_copy(self) -> int:
        """The highest number of a copy that there is. Raises nothing."""
        if self._data_dir is None:
            return 0
        with contextlib.suppress(OSError):
            names = [path.name for path in self.directory.path.iterdir()]
            return max((int(name) for name in names if _NUMBER.fullmatch(name)), default=0)
        return 0

    def digest_of(self, version: AdapterVersion) -> str:
        """The digest of a version's files. Empty: they are gone, or have changed. Raises nothing."""
        directory = Path(version.directory)
        with contextlib.suppress(OSError, ValueError):
            if version.identity in ("", identity(directory)):
                return content_digest(directory)
        return ""


class ScannedAdapter(NamedTuple):
    """An adapter of a directory: its files as `identity` sees them, and the digest of their content."""

    identity: str
    digest: str


def identity(directory: Path) -> str:
    """Differs if a file is written to or replaced. As `identity` in workers/adapters/adapter.py."""
    return ".".join(file_identity(directory / name) for name in FILES)


def _found(directory: Path, known: ScannedAdapter | None, max_bytes: int) -> ScannedAdapter:
    """The adapter in a directory; `known` while its files are written to. Raises OSError if there is none."""
    before = identity(directory)
    if known is not None and known.identity == before:
        return known
    if (directory / CONFIG).stat().st_size > MAX_CONFIG_BYTES or (
        directory / WEIGHTS
    ).stat().st_size > max_bytes:
        # Workers refuse it by name, and nobody waits until it is read.
        return ScannedAdapter(before, "")
    digest = content_digest(directory)
    if identity(directory) == before:
        return ScannedAdapter(before, digest)
    if known is None:
        raise OSError(errno.EAGAIN, "it changes")
    return known


def scan(
    directory: Path, known: Mapping[str, ScannedAdapter], max_bytes: int
) -> tuple[dict[str, ScannedAdapter], dict[str, str]] | None:
    """The adapters in a directory by name, and why other subdirectories are none. Raises nothing.

    None: it cannot be read. known: those that were found before. What has changed since is read. max_bytes:
    of a file of weights.
    """
    found: dict[str, ScannedAdapter] = {}
    ignored: dict[str, str] = {}
    try:
        for entry in directory.iterdir():
            if not entry.is_dir():
                continue
            try:
                check_adapter_id(entry.name)
                found[entry.name] = _found(entry, known.get(entry.name), max_bytes)
            except InvalidArgument as error:
                ignored[entry.name] = error.message
            except OSError:
                missing = [name for name in FILES if not os.path.exists(entry / name)]  # noqa: PTH110 - no error
                why = f"it has no {' and no '.join(missing)}" if missing else "it cannot be read"
                ignored[entry.name] = why
    except OSError as error:
        _log.warning("cannot read the directory of adapters", error=error.strerror)
        return None
    return found, ignored


def bad_adapter(why: str) -> InvalidArgument:
    """The files are not an adapter that can be served. `why` has no paths of this machine."""
    return InvalidArgument("BAD_ADAPTER", "source", why)
