"""Pages of KV as files: how they are named, written, checked, listed and deleted.

    DIR/quire-kv/lock                        the bytes of all files; who writes or deletes locks it
    DIR/quire-kv/tmp                         the file that is being written
    DIR/quire-kv/IDENTITY/d4/d41d8cd9...     a page, under its digest

A page's digest says which tokens and which salt it has the keys and values of (`page_pool`), the *identity*
which weights, code and layout (`workers.models.kv_identity`). A file begins with both and checksums of the
page, so that whatever has happened to it, it is either what its name says or it is refused. The checksums
find accidents; who could write other ones could as well write to the memory of the worker.

Any number of processes of one user may use a directory. Reads lock nothing: a file has its name when it is
complete, and a deleted one is just missing. A process writes while it has the lock, so that the bytes of all
files stay within the bound at any moment, and a process that is killed leaves nothing behind but `tmp`.
Nothing is synced: a page that a crash of the machine tears is refused.

Blocks for as long as the disk does: `disk_threads` has the threads. Knows no states of pages: see
`disk_pages`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.kv.disk_pages import PageWrite, ReadOutcome

IDENTITY_BYTES = 16
_MAGIC = b"QUIREKV1"
# Magic, identity, digest. Then the CRC-32 of each piece of the page: the keys or the values of a layer.
_HEADER = struct.Struct("<8s16s16s")
# What the file system gives a file at least.
_UNIT_BYTES = 4096
# Buffers of one call; Linux takes 1024.
_MOST_BUFFERS = 512
# How long a write waits for the lock: a process that has it may be stopped, and must stop no other.
_LOCK_S = 1.0
_LOCK_POLL_S = 0.005
# If there is no room, this part of the bound is freed at once: to find the oldest files, all are looked at.
_FREED_SHARE = 0.02
# A directory that has changed so recently may change again with the same time.
_RECENT_NS = 100_000_000


class PageFiles:
    """The files of one identity, in a directory that others may use too. Every method may raise OSError.

    `read` may be called from any thread, the others from one at a time.
    """

    def __init__(
        self, directory: Path, identity: bytes, *, page_bytes: int, pieces: int, max_bytes: int
    ) -> None:
        """Make the directory, and bring its count of bytes up to date.

        Raises OSError, also for a directory that other users could change or read.

        Args:
            directory: DIR.
            identity: What pages are only valid for: IDENTITY_BYTES.
            page_bytes: The bytes of each page.
            pieces: The pieces of its memory.
            max_bytes: Of all files, those of other identities included.
        """
        self._root = directory / "quire-kv"
        self._identity = identity
        self._own = self._root / identity.hex()
        self._page_bytes, self._max_bytes = page_bytes, max_bytes
        self._header_bytes = _HEADER.size + 4 * pieces
        self._file_bytes = _on_disk(self._header_bytes + page_bytes)
        # By name of a directory of pages: when it has changed, and what was in it.
        self._listed: dict[str, tuple[int, frozenset[bytes]]] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for own in (self._root, self._own):
            own.mkdir(mode=0o700, exist_ok=True)
            _check_private(own)
        # Of all files, when it was last known here.
        self.bytes = 0
        self._lock = -1
        # Of a file system that is read-only, pages can be read.
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self._root / "lock", flags, 0o600)
            with self._locked() as is_locked:
                if is_locked:
                    self._count(0)

    def write(self, write: PageWrite, views: Sequence[memoryview]) -> bool:
        """Store a page. False: it is stale, there is no room, or another process has the lock."""
        path = self._path(write.digest)
        with self._locked() as is_locked:
            if not is_locked:
                return False
            if path.exists():
                return True
            if not self._make_room():
                return False
            temporary = self._root / "tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(temporary, flags, 0o600)
            try:
                _write_all(descriptor, [memoryview(self._header(write.digest, views)), *views])
            finally:
                os.close(descriptor)
            if write.is_stale:
                return False
            for parent in (self._own, path.parent):
                parent.mkdir(mode=0o700, exist_ok=True)
            # Before it has its name: if this process is killed between the two, the count is rather too high.
            self._set_count(self.bytes + self._file_bytes)
            temporary.rename(path)
        return True

    def read(self, digest: bytes, views: Sequence[memoryview]) -> ReadOutcome:
        """Read a page into memory, which has any contents if the outcome is not READ."""
        path = self._path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ReadOutcome.MISSING
        try:
            header = bytearray(self._header_bytes)
            size = os.fstat(descriptor).st_size
            is_good = (
                size == self._header_bytes + self._page_bytes
                and _read_all(descriptor, [memoryview(header), *views])
                and bytes(header) == self._header(digest, views)
            )
            if is_good:
                # So that the least recently used are deleted first.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        except OSError:
            return ReadOutcome.MISSING
        finally:
            os.close(descriptor)
        if is_good:
            return ReadOutcome.READ
        with contextlib.suppress(OSError):
            path.unlink()
        return ReadOutcome.REFUSED

    def list_changes(self) -> tuple[set[bytes], set[bytes]]:
        """The digests of files that have come since the last time, and of those that have gone."""
        found: set[bytes] = set()
        gone: set[bytes] = set()
        names = {entry.name for entry in _entries(self._own)}
        for name in names | self._listed.keys():
            changed_ns, before = self._listed.get(name, (0, frozenset()))
            now_ns, digests = changed_ns, frozenset[bytes]()
            # It may be removed at any time.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                now_ns = os.stat(self._own / name).st_mtime_ns  # noqa: PTH116 - thousands of times
                if now_ns == changed_ns:
                    continue
                digests = frozenset(_digests(self._own / name))
            found |= digests - before
            gone |= before - digests
            is_recent = time.time_ns() - now_ns < _RECENT_NS
            self._listed[name] = 0 if is_recent else now_ns, digests
            if not digests:
                del self._listed[name]
        return found, gone - found

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._own / name[:2] / name

    def _header(self, digest: bytes, views: Sequence[memoryview]) -> bytes:
        """What the file of a page with these contents begins with."""
        checksums = struct.pack(f"<{len(views)}I", *map(zlib.crc32, views))
        return _HEADER.pack(_MAGIC, self._identity, digest) + checksums

    # With the lock.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the directory for as long as the block runs. False: another process has it."""
        until_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    yield False
                    return
                time.sleep(_LOCK_POLL_S)
        try:
            stored = os.pread(self._lock, 8, 0)
            self.bytes = int.from_bytes(stored, "little")
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _set_count(self, count_bytes: int) -> None:
        self.bytes = count_bytes
        os.pwrite(self._lock, count_bytes.to_bytes(8, "little"), 0)

    def _make_room(self) -> bool:
        """Whether another page fits, after the least recently used files were deleted."""
        if self.bytes + self._file_bytes <= self._max_bytes:
            return True
        if self._file_bytes > self._max_bytes:
            return False
        self._count(max(self._file_bytes, int(_FREED_SHARE * self._max_bytes)))
        return self.bytes + self._file_bytes <= self._max_bytes

    def _count(self, room_bytes: int) -> None:
        """Count the bytes of all files again, and delete the oldest until there is so much room."""
        files = list(_pages(self._root))
        total = sum(size for _, size, _ in files)
        excess = total + room_bytes - self._max_bytes
        if excess > 0:
            for _, size, path in sorted(files):
                if excess <= 0:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108 - thousands of times
                total, excess = total - size, excess - size
                if not path.startswith(str(self._own)):
                    for parent in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):  # noqa: PTH120
                        with contextlib.suppress(OSError):
                            os.rmdir(parent)  # noqa: PTH106 - if it is empty
        self._set_count(total)


def _on_disk(size: int) -> int:
    """The bytes that a file of this size takes."""
    return -(-size // _UNIT_BYTES) * _UNIT_BYTES


def _check_private(directory: Path) -> None:
    """Raises PermissionError for a directory that others own or may enter, or that is a link."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(13, "it must be a directory of this user that no other may enter", directory)


def _pages(root: Path) -> Iterator[tuple[int, int, str]]:
    """When each file of any identity was last used, in ns, its bytes, and its path."""
    for identity in _entries(root):
        if len(identity.name) != 2 * IDENTITY_BYTES:
            continue
        for folder in _entries(identity.path):
            for file in _entries(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    yield status.st_mtime_ns, _on_disk(status.st_size), file.path


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    """What is in a directory: nothing, if it was removed meanwhile, or is none."""
    try:
        return list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _digests(folder: Path) -> Iterator[bytes]:
    """Of the pages in a directory. Other files are of nobody."""
    for name in os.listdir(folder):  # noqa: PTH208 - thousands of times
        with contextlib.suppress(ValueError):
            yield bytes.fromhex(name)


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Raises OSError if not all was written: the disk is full then."""
    for first in range(0, len(views), _MOST_BUFFERS):
        part = views[first : first + _MOST_BUFFERS]
        if os.writev(descriptor, part) != sum(view.nbytes for view in part):
            raise OSError(28, "No space left on device")


def _read_all(descriptor: int, views: Sequence[memoryview]) -> bool:
    """Whether the file had enough."""
    for first in range(0, len(views), _MOST_BUFFERS):
        part = views[first : first + _MOST_BUFFERS]
        if os.readv(descriptor, part) != sum(view.nbytes for view in part):
            return False
    return True
