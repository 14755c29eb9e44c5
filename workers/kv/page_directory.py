"""A directory of pages that processes share: names, the lock, the bound of bytes, and what gives way.

    DIR/quire-kv/lock                      the bytes of all files; who writes or deletes locks it
    DIR/quire-kv/tmp                       the file that is being written
    DIR/quire-kv/IDENTITY/d4/DIGESTPARENT  a page: its digest, d41d8c..., and that of the page before it;
                                           or the recurrent state after that page, with its own digest

Any number of processes of one user may use it. Reads lock nothing: a file has its name when it is complete,
and a deleted one is just missing. A process writes while it has the lock, so that the bytes of all files stay
within the bound at any moment, and a process that is killed leaves nothing behind but `tmp`. Nothing is
synced.

Names say which page follows which, so that listings alone tell which file gives way next, of whatever
identity (`eviction_order`). Before one is deleted its time is looked at: another process may have used it.
What is no regular file of such a name is left alone.

Blocks for as long as the disk does. What is in files is of `page_files`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workers.common.trusted import make_private
from workers.kv.eviction_order import EvictionOrder, StoredPage
from workers.kv.page_pool import DIGEST_BYTES, state_digest

IDENTITY_BYTES = 16
_IDENTITY, _FOLDER = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
# The digest of a page, or of a state; and the digest of the page before the page.
_PAGE = re.compile(f"[0-9a-f]{{32}}({state_digest(b'').hex()})?[0-9a-f]{{32}}")
# What the file system gives a file at least.
_UNIT_BYTES = 4096
# How long a write waits for the lock: a process that has it may be stopped, and must stop no other.
_LOCK_S = 1.0
_LOCK_POLL_S = 0.005
# If there is no room, all files are counted again, but not more often than this, nor for more of the time.
_RECOUNT_S = 2.0
_RECOUNT_SHARE = 0.05
# A directory that has changed so recently may change again with the same time.
_RECENT_NS = 100_000_000
# When a file was used that cannot be deleted: it gives way last.
_NEVER_NS = 1 << 63
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The errors of a directory that was removed meanwhile, is none, or may not be read.
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)


@dataclass(slots=True)
class _Folder:
    """A directory of pages when it was last listed.

    Attributes:
        changed_ns: When it had changed; 0: it may have changed since.
        keys: Of its files.
    """

    changed_ns: int = 0
    keys: set[bytes] = field(default_factory=set)


class PageDirectory:
    """The files of all identities, pages and states alike. A file's *key* is its identity and its digest.

    Every method may raise OSError. `open_page` and `delete_page` may be called from any thread, the others
    from one at a time.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Make the directory, and bring its count of bytes up to date.

        Raises OSError, also for a directory that other users could change or read.

        Args:
            directory: DIR.
            max_bytes: Of all files.
        """
        self._directory, self._max_bytes = directory, max_bytes
        # As they were last listed: folders by their path, and the files in them.
        self._folders: dict[str, _Folder] = {}
        self._order = EvictionOrder()
        # Since the last `list_changes`, but for what was stored here.
        self._come: set[bytes] = set()
        self._gone: set[bytes] = set()
        # When all files may be counted again.
        self._recount_s = 0.0
        # The size of all files, as last known.
        self.size_bytes = 0
        # File descriptors, so that what others put in the place of the directory is never used. No lock, -1:
        # pages of a file system that is read-only can be read.
        self._root = self._lock = -1
        self._open()
        with contextlib.suppress(OSError), self._locked() as is_locked:
            if is_locked:
                self._recount()
                self._free(0)

    def open_page(self, key: bytes, parent: bytes) -> int:
        """Open a file for reading. `parent`: the digest of the page before it."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(_path(key, parent), flags, dir_fd=self._root)

    def delete_page(self, key: bytes, parent: bytes) -> None:
        """Delete a file that is of no use. Its bytes are counted until there is no room."""
        os.unlink(_path(key, parent), dir_fd=self._root)

    def store(self, key: bytes, parent: bytes, size_bytes: int, fill: Callable[[int], bool]) -> bool:
        """Store a page, if it is not there.

        Args:
            key: Its identity and its digest.
            parent: The digest of the page before it.
            size_bytes: Of the file.
            fill: Writes it to a file descriptor. False: it must not be stored.

        Returns False also if there is no room, or if another process has the lock.
        """
        try:
            with self._locked() as is_locked:
                return is_locked and self._store(key, parent, _rounded(size_bytes), fill)
        except FileNotFoundError:
            # Someone has deleted the directory: for the next page there is a new one.
            self._open()
            return False

    def list_changes(self) -> tuple[set[bytes], set[bytes]]:
        """The keys of files that have come since the last time, and of those that have gone."""
        self._refresh()
        changes = self._come, self._gone
        self._come, self._gone = set(), set()
        return changes

    # Listings.

    def _open(self) -> None:
        root = self._directory / "quire-kv"
        make_private(self._directory)
        root.mkdir(mode=0o700, exist_ok=True)
        opened = os.open(root, _OPEN_DIRECTORY)
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(opened)
            raise PermissionError(
                errno.EACCES, "it must be of this user, and no other may enter it", str(root)
            )
        self._root = _opened_as(self._root, opened)
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock = _opened_as(self._lock, os.open("lock", flags, 0o600, dir_fd=self._root))

    def _refresh(self) -> None:
        """Bring all folders that have changed up to date."""
        folders = {
            f"{identity}/{folder}"
            for identity in self._directories(".", _IDENTITY)
            for folder in self._directories(identity, _FOLDER)
        }
        for path in folders | self._folders.keys():
            self._list(path)

    @contextlib.contextmanager
    def _entries(self, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """The entries of a directory. Nothing if it does not exist or cannot be read."""
        try:
            descriptor = os.open(path, _OPEN_DIRECTORY, dir_fd=self._root)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            yield iter(())
            return
        try:
            with os.scandir(descriptor) as entries:
                yield entries
        finally:
            os.close(descriptor)

    def _directories(self, path: str, names: re.Pattern[str]) -> list[str]:
        with self._entries(path) as entries:
            found = [entry for entry in entries if names.fullmatch(entry.name)]
            return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]

    def _list(self, path: str) -> None:
        """Bring a folder up to date."""
        folder = self._folders.setdefault(path, _Folder())
        changed_ns, keys = 0, set[bytes]()
        # It may be removed at any time.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            changed_ns = os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mtime_ns
            if changed_ns == folder.changed_ns:
                return
            keys = self._list_files(path)
        come, gone = keys - folder.keys, folder.keys - keys
        for key in gone:
            self._order.remove(key)
        self._come |= come
        self._come -= gone
        self._gone |= gone
        self._gone -= come
        is_recent = time.time_ns() - changed_ns < _RECENT_NS
        folder.changed_ns, folder.keys = 0 if is_recent else changed_ns, keys
        if not keys:
            del self._folders[path]

    def _list_files(self, path: str) -> set[bytes]:
        """The keys of the files in a folder. Those that are new are put in order."""
        keys: set[bytes] = set()
        identity, _, beginning = path.partition("/")
        owner = bytes.fromhex(identity)
        with self._entries(path) as entries:
            for entry in entries:
                is_page = _PAGE.fullmatch(entry.name) and entry.name.startswith(beginning)
                if not is_page or not entry.is_file(follow_symlinks=False):
                    continue
                name = bytes.fromhex(entry.name)
                key, parent = owner + name[:-DIGEST_BYTES], owner + name[-DIGEST_BYTES:]
                # It may be deleted at any time.
                with contextlib.suppress(FileNotFoundError):
                    if key not in self._order:
                        status = entry.stat(follow_symlinks=False)
                        if status.st_size > self._max_bytes:
                            continue
                        self._order.add(key, parent, _rounded(status.st_size), status.st_mtime_ns)
                    keys.add(key)
        return keys

    # With the lock.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the directory for as long as the block runs. False: another process has it."""
        if self._lock < 0:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
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
            self.size_bytes = int.from_bytes(stored, "little")
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _set_count(self, count_bytes: int) -> None:
        self.size_bytes = count_bytes
        os.pwrite(self._lock, count_bytes.to_bytes(8, "little"), 0)

    def _store(self, key: bytes, parent: bytes, size_bytes: int, fill: Callable[[int], bool]) -> bool:
        path = _path(key, parent)
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path, dir_fd=self._root, follow_symlinks=False)
            # Something else may be in its place, which a file does not replace if it is a directory.
            if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                return stat.S_ISREG(status.st_mode)
        # Folders last: those that are empty are deleted when room is made.
        if not (self._make_room(size_bytes) and self._make_folders(path)):
            return False
        descriptor = self._open_temporary()
        try:
            if not fill(descriptor):
                return False
        finally:
            os.close(descriptor)
        # Before it has its name: if this process is killed between the two, the count is rather too high.
        self._set_count(self.size_bytes + size_bytes)
        os.rename("tmp", path, src_dir_fd=self._root, dst_dir_fd=self._root)
        self._folders.setdefault(_folders(path)[1], _Folder()).keys.add(key)
        self._gone.discard(key)
        self._order.add(key, key[:IDENTITY_BYTES] + parent, size_bytes, time.time_ns())
        return True

    def _make_folders(self, path: str) -> bool:
        """Whether the directories of a file are there. False: something else is, such as a link."""
        for folder in _folders(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=self._root)
            if not stat.S_ISDIR(os.stat(folder, dir_fd=self._root, follow_symlinks=False).st_mode):
                return False
        return True

    def _open_temporary(self) -> int:
        # Whatever was left there: it may be a pipe, whose opening would wait.
        with contextlib.suppress(FileNotFoundError):
            os.unlink("tmp", dir_fd=self._root)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open("tmp", flags, 0o600, dir_fd=self._root)

    def _make_room(self, size_bytes: int) -> bool:
        """Whether another file fits, after others gave way."""
        if self.size_bytes + size_bytes <= self._max_bytes:
            return True
        if size_bytes > self._max_bytes:
            return False
        if time.monotonic() < self._recount_s and self._free(size_bytes):
            return True
        self._recount()
        return self._free(size_bytes)

    def _recount(self) -> None:
        """Count the bytes of all files again: some may have been deleted by who counts nothing."""
        began_s = time.monotonic()
        self._refresh()
        self._set_count(self._order.size_bytes)
        done_s = time.monotonic()
        self._recount_s = done_s + max(_RECOUNT_S, (done_s - began_s) / _RECOUNT_SHARE)

    def _free(self, room_bytes: int) -> bool:
        """Delete files until there is so much room. False: there is not so much."""
        count_bytes = self.size_bytes
        while count_bytes + room_bytes > self._max_bytes and (page := self._order.next()):
            if page.used_ns >= _NEVER_NS:
                break
            if self._delete_unless_used(page):
                count_bytes = max(0, count_bytes - page.size_bytes)
        self._set_count(count_bytes)
        return count_bytes + room_bytes <= self._max_bytes

    def _delete_unless_used(self, page: StoredPage) -> bool:
        """Whether the bytes of a file are free now. If not, it is not next in the order any more."""
        path, is_deleted = _path(page.key, page.parent[IDENTITY_BYTES:]), True
        try:
            used_ns = os.stat(path, dir_fd=self._root, follow_symlinks=False).st_mtime_ns
            if used_ns > page.used_ns:
                self._order.use(page.key, used_ns)
                return False
            os.unlink(path, dir_fd=self._root)
        except FileNotFoundError:
            # Another process deleted it. If that has not counted it, the next recount will.
            is_deleted = False
        except OSError:
            self._order.use(page.key, _NEVER_NS)
            return False
        self._order.remove(page.key)
        self._gone.add(page.key)
        self._come.discard(page.key)
        keys = self._folders[_folders(path)[1]].keys
        keys.discard(page.key)
        if not keys:
            for folder in reversed(_folders(path)):
                # It may not be empty.
                with contextlib.suppress(OSError):
                    os.rmdir(folder, dir_fd=self._root)
        return is_deleted


def _path(key: bytes, parent: bytes) -> str:
    """The path of a page's file in the directory. `parent`: the digest of the page before it."""
    digest = key[IDENTITY_BYTES:].hex()
    return f"{key[:IDENTITY_BYTES].hex()}/{digest[:2]}/{digest}{parent.hex()}"


def _folders(path: str) -> tuple[str, str]:
    """The directories of a file: that of its identity, and that in it."""
    identity, folder, _ = path.split("/")
    return identity, f"{identity}/{folder}"


def _rounded(size_bytes: int) -> int:
    """The space that a file of this size takes on disk."""
    return -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES


def _opened_as(descriptor: int, opened: int) -> int:
    """The file descriptor of what was just opened: that which other threads use already, if there is one."""
    if descriptor < 0:
        return opened
    os.dup2(opened, descriptor, inheritable=False)
    os.close(opened)
    return descriptor
