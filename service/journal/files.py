"""The files of a journal: a lock, a database and what SQLite keeps beside it. It does not know records.

    lock            held while a gateway uses the directory; says which process that is
    journal.db      table log: a row for each group of commits; table meta: what is true of all of them
    journal.db-wal  what was written and is not in journal.db yet; after a crash it is part of the journal
    floor           which row has been written: see `Floor`

Each gateway writes its own name into table meta when it opens the journal, and writes nothing any more once
another name is there: the lock may have been removed, and another gateway have begun.

Whatever SQLite or the system says against them becomes a JournalUnusable that tells the operator what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sqlite3
import stat
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal
from zlib import crc32

from service.journal.base import JournalUnusable

Sync = Literal["normal", "full"]
# Device and inode; None of a file that is not there.
_Identity = tuple[int, int] | None

DATABASE: Final = "journal.db"
LOCK: Final = "lock"
FLOOR: Final = "floor"
# Of the tables and what is in them; a row says its own.
FORMAT: Final = 1
# Tells our files from other databases: "Quir".
_APPLICATION_ID: Final = 0x51756972
_MAGIC: Final = b"SQLite format 3\0"
# In table meta: the last gateway that opened the journal.
_OWNER: Final = "owner"
_TAKEN: Final = "another gateway has opened the journal since, whose lock was removed"
# An operator who reads the file locks it for moments only.
_BUSY_S: Final = 1.0
# A write-ahead log that became larger is cut when it begins anew.
_WAL_LIMIT_BYTES: Final = 64 << 20

_RESTORE: Final = "Restore the directory from a backup; or, to begin without caches, move it away."

_STAMP: Final = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
_SCHEMA: Final = """
    CREATE TABLE log (seq INTEGER PRIMARY KEY, wall_ns INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
    INSERT INTO meta VALUES ('first_seq', NULL), ('model', NULL);
"""


class NotOurs(OSError):
    """What is written would be lost: a file has lost its name, or another gateway has taken the journal."""


class Files:
    """Owner of the lock and of what is in the directory. Threads may use it one after another."""

    def __init__(self, directory: Path, sync: Sync) -> None:
        """Makes what is missing. Raises JournalUnusable."""
        self.path = directory / DATABASE
        self._sync = sync
        self._lock = _lock(directory)
        # Written into the database, for the case that the lock is removed and another gateway begins.
        self._owner = uuid.uuid4().hex
        self._wal = self.path.with_name(self.path.name + "-wal")
        self._wal_identity: _Identity = None
        self.floor = Floor(directory / FLOOR, sync)
        try:
            with unusable(self.path):
                self._prepare()
        except BaseException:
            os.close(self._lock)
            raise

    def connect(self) -> sqlite3.Connection:
        """The open database. Raises sqlite3.Error, or NotOurs if it has been replaced."""
        self._require(self.path, self._identity)
        db = self._connect("rw")
        try:
            _ask(db, "PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {self._sync}")
            # Checkpoints are made when they disturb least.
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
            # It stays the same as long as a connection is open.
            self._wal_identity = _identity(self._wal)
        except BaseException:
            db.close()
            raise
        return db

    def require_names(self) -> None:
        """Raises NotOurs unless what has been written would be found by the next gateway."""
        self._require(self.path, self._identity)
        self._require(self._wal, self._wal_identity)

    def require_owner(self, db: sqlite3.Connection) -> None:
        """Raises NotOurs if another gateway has taken the journal, or sqlite3.Error. Within a transaction."""
        if read_meta(db, _OWNER) != self._owner:
            raise NotOurs(errno.ESTALE, _TAKEN, str(self.path))

    def insert(self, db: sqlite3.Connection, seq: int, wall_ns: int, row: bytes) -> None:
        """Writes a row, unless another gateway has taken the journal. Raises NotOurs or sqlite3.Error."""
        # One statement, which is a transaction: several would wait for the interpreter as often.
        insert = "INSERT INTO log SELECT ?, ?, ? FROM meta WHERE key = ? AND value = ?"
        if not db.execute(insert, (seq, wall_ns, row, _OWNER, _stored(_OWNER, self._owner))).rowcount:
            raise NotOurs(errno.ESTALE, _TAKEN, str(self.path))

    @staticmethod
    def _require(path: Path, identity: _Identity) -> None:
        if _identity(path) != identity:
            raise NotOurs(errno.ESTALE, "it was removed or replaced while it was in use", str(path))

    def close(self) -> None:
        """Lets another gateway in."""
        self.floor.close()
        os.close(self._lock)

    def _prepare(self) -> None:
        if not self.path.exists():
            if self._wal.exists() or self.floor.seq():
                raise JournalUnusable(
                    f"{self.path} is missing, but others of its files are there. "
                    f"Bring it back; or, to begin without caches, remove what is left in {self.path.parent}."
                )
            _create(self.path)
        found = self.path.stat()
        self._identity = _identity(self.path)
        if not stat.S_ISREG(found.st_mode):
            raise JournalUnusable(f"{self.path} is not a regular file. Move it away.")
        with self.path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise JournalUnusable(
                f"{self.path} is not a database: it was truncated or overwritten. {_RESTORE}"
            )
        # Who only reads leaves a write-ahead log as it is, and what is refused here stays as it is.
        with contextlib.closing(self._connect("ro")) as db:
            self._check_format(db)
            self._check_floor(db)
        with contextlib.closing(self.connect()) as db:
            # First, since on a full disk there may be room only where the log begins anew.
            self.floor.write(last_seq(db), synced=checkpoint(db, "PASSIVE"))
            # Says no to a file that cannot be written to, too.
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_OWNER, _stored(_OWNER, self._owner)))

    def _connect(self, mode: Literal["ro", "rw"]) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=_BUSY_S,
            # Each statement is a transaction, unless one is begun.
            isolation_level=None,
            check_same_thread=False,
        )

    def _check_floor(self, db: sqlite3.Connection) -> None:
        """SQLite takes a log that is missing, empty or damaged for one that ends earlier."""
        last, floor = last_seq(db), self.floor.seq()
        if last < floor:
            raise JournalUnusable(
                f"{self.path} ends with row {last}, and row {floor} was written: {self._wal} was lost "
                "or damaged. Bring both back as they were; or, to do without the last rows, remove "
                f"{self.floor.path}."
            )

    def _check_format(self, db: sqlite3.Connection) -> None:
        (application,), (version,) = _ask(db, "PRAGMA application_id"), _ask(db, "PRAGMA user_version")
        if application != _APPLICATION_ID:
            raise JournalUnusable(f"{self.path} is a database of another program. Choose another directory.")
        if version > FORMAT:
            raise JournalUnusable(
                f"{self.path} has format {version}, and this version of Quire knows {FORMAT} at most. "
                "Use the version that wrote it, or a newer one; or another directory."
            )


class Floor:
    """Which rows have to be there: without it nobody would notice that the last ones are lost.

    After a crash of the system fewer have to than after one of the gateway, unless each was synchronised.
    """

    _LAYOUT = struct.Struct("<QQ16s")

    def __init__(self, path: Path, sync: Sync) -> None:
        self.path = path
        self._sync = sync
        self._map: mmap.mmap | None = None
        self._synced = 0
        self._boot = _boot_id()

    def seq(self) -> int:
        """The last row that has to be there; 0 if none has to. Raises OSError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        if not any(data):
            # A crash came before any of it was written.
            return 0
        size = self._LAYOUT.size
        if len(data) != size + 4 or crc32(data[:size]) != int.from_bytes(data[size:], "little"):
            raise JournalUnusable(
                f"{self.path} is damaged, so nobody can tell whether the last rows are there. "
                "Restore the directory from a backup; or, to do with what is there, remove this file."
            )
        written, synced, boot = self._LAYOUT.unpack_from(data)
        same_boot = boot == self._boot and any(boot)
        return int(written if same_boot or self._sync == "full" else synced)

    def write(self, seq: int, *, synced: bool = False) -> None:
        """Row `seq` is the last one now. `synced`: it would survive a crash of the system. Raises OSError."""
        if self._map is None:
            self._map = self._open()
        if synced or self._sync == "full":
            self._synced = seq
        data = self._LAYOUT.pack(seq, min(seq, self._synced), self._boot)
        # Memory: a system call would let the event loop have the interpreter, for milliseconds if it is busy.
        self._map[:] = data + crc32(data).to_bytes(4, "little")

    def close(self) -> None:
        """Lets go of the file."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _open(self) -> mmap.mmap:
        size = self._LAYOUT.size + 4
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # There is room for it from now on.
            os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)


# What using a connection may raise: where the file is damaged, also when a message of SQLite's is decoded.
FAILURES: Final = (sqlite3.Error, OSError, UnicodeDecodeError, OverflowError, MemoryError)


@contextlib.contextmanager
def unusable(path: Path) -> Iterator[None]:
    """Turns what SQLite and the system say against the files into JournalUnusable."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalUnusable(f"{path}: {error}. {_advice(error)}") from error
    except UnicodeDecodeError as error:
        # In SQLite's own message about what it found.
        raise JournalUnusable(f"{path} is damaged. {_RESTORE}") from error
    except OSError as error:
        advice = "Make sure that it can be written to, and that there is room."
        if isinstance(error, FileExistsError | NotADirectoryError):
            advice = "A file is where a directory is to be: name another with --data-dir."
        raise JournalUnusable(f"{error.filename or path}: {error.strerror}. {advice}") from error


def checkpoint(db: sqlite3.Connection, mode: Literal["PASSIVE", "TRUNCATE"]) -> bool:
    """Brings what the write-ahead log has into the database. False if not all of it. Raises sqlite3.Error."""
    busy, in_log, done = _ask(db, f"PRAGMA wal_checkpoint({mode})")
    return not busy and in_log == done


def last_seq(db: sqlite3.Connection) -> int:
    """The last row there is, or was before rows were dropped. Raises sqlite3.Error."""
    (last,) = _ask(db, "SELECT coalesce(max(seq), 0) FROM log")
    return max(int(last), first_seq(db) - 1)


def read_meta(db: sqlite3.Connection, key: str) -> str | None:
    """What is true of all rows. Raises sqlite3.Error."""
    (stored,) = _ask(db, "SELECT value FROM meta WHERE key = ?", key)
    if stored is None:
        return None
    value, _, checksum = str(stored).rpartition(" ")
    if checksum != _checksum(key, value):
        raise sqlite3.DatabaseError(f"the checksum of {key} in table meta differs")
    return value


def write_meta(db: sqlite3.Connection, key: str, value: int | str) -> None:
    """Durable with the transaction it is in. Raises sqlite3.Error."""
    db.execute("UPDATE meta SET value = ? WHERE key = ?", (_stored(key, value), key))


def first_seq(db: sqlite3.Connection) -> int:
    """The first row that is needed. Raises sqlite3.Error."""
    found = read_meta(db, "first_seq")
    if found is None:
        raise sqlite3.DatabaseError("table meta does not say which row is the first")
    return int(found)


def _stored(key: str, value: int | str) -> str:
    return f"{value} {_checksum(key, str(value))}"


def _checksum(key: str, value: str) -> str:
    return f"{crc32(f'{key} {value}'.encode()):08x}"


def _ask(db: sqlite3.Connection, query: str, *values: object) -> tuple[Any, ...]:
    """The only row of the answer."""
    row: tuple[Any, ...] | None = db.execute(query, values).fetchone()
    if row is None:
        raise sqlite3.DatabaseError("a row that has to be there is missing")
    return row


def _identity(path: Path) -> _Identity:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _boot_id() -> bytes:
    """Of the system since it was started; zeros if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def _lock(directory: Path) -> int:
    path = directory / LOCK
    with unusable(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise JournalUnusable(
                f"{directory} is in use by another gateway, process {holder}. "
                "End it, or choose another directory."
            ) from None
        except BaseException:
            os.close(lock)
            raise
    return lock


def _create(path: Path) -> None:
    """Under its name it is whole, whenever we are interrupted."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as db:
        db.executescript(f"BEGIN; {_STAMP} {_SCHEMA} COMMIT;")
        write_meta(db, "first_seq", 1)
    unfinished.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _advice(error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_").split("_")[0]:
        case "READONLY" | "CANTOPEN" | "PERM" | "AUTH":
            return "Make sure that this user may write to the directory and the files in it."
        case "FULL" | "IOERR":
            return "Make sure that the disk has room and works."
        case "BUSY" | "LOCKED":
            return "Another program has locked the file: end it."
    return _RESTORE
