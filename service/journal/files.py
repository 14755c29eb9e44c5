"""The files of a journal: a lock, an SQLite database and its write-ahead log.

    lock            locked while a gateway uses the directory; contains its pid
    journal.db      table log: a row for each group of commits; table meta: values for the whole journal
    journal.db-wal  SQLite's write-ahead log; after a crash it is part of the journal
    floor           number of the last written row: see `HighWaterMark`

Each gateway writes a random id into table meta when it opens the journal. It stops writing if it finds
another id there: then the lock file was removed and another gateway has opened the journal.

It also stops if the rows are not as it has left them. A row is inserted only behind the last one that it has
written. SQLite does not notice a file that was overwritten in place, since it has pages in memory. But nobody
else writes to `journal.db`: if its time or size has changed, another connection looks at all rows. So it
does before a checkpoint, if another program has written by way of SQLite.

Errors of SQLite or the system become a JournalUnusable that tells the operator what to do.
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

from service.journal.base import DirectoryInUse, JournalUnusable
from service.journal.recovery import Recovery

Sync = Literal["normal", "full"]
# Device and inode; None if the file does not exist.
_Identity = tuple[int, int] | None

DATABASE: Final = "journal.db"
LOCK: Final = "lock"
HIGH_WATER_MARK: Final = "floor"
# Format of the tables. Rows have formats of their own.
FORMAT: Final = 1
# Distinguishes our files from other databases: "Quir".
_APPLICATION_ID: Final = 0x51756972
_MAGIC: Final = b"SQLite format 3\0"
# Key in table meta: the id of the last gateway that opened the journal.
_OWNER: Final = "owner"
_TAKEN: Final = "another gateway has opened the journal since, whose lock was removed"
# How long to wait for a lock of another reader, such as an operator's shell.
BUSY_S: Final = 1.0
# A larger write-ahead log is truncated to this size when SQLite starts it from the beginning again.
_WAL_LIMIT_BYTES: Final = 64 << 20

_RESTORE: Final = "Restore the directory from a backup; or, to begin without caches, move it away."

_CHANGED: Final = (
    "Another program has removed rows, or an older copy was put in its place. Stop the gateway, and restore"
    " all files of the directory from the newest copy"
)

_INSERT: Final = (
    "INSERT INTO log SELECT ?, ?, ? FROM meta WHERE key = ? AND value = ? AND (SELECT max(seq) FROM log) IS ?"
)
ROWS: Final = "SELECT seq, wall_ns, data FROM log WHERE seq BETWEEN ? AND ? ORDER BY seq"
_STAMP: Final = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
_SCHEMA: Final = """
    CREATE TABLE log (seq INTEGER PRIMARY KEY, wall_ns INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
    INSERT INTO meta VALUES ('first_seq', NULL), ('model', NULL);
"""


class NotOwner(OSError):
    """Writes would be lost: a file was removed or replaced, or another gateway has opened the journal."""


class FileChanged(OSError):
    """Another program has written to the database's file. Nothing was written since."""


class LostRows(OSError):
    """The rows are not as this gateway has left them."""


class Files:
    """Owner of the lock and of the files. Not thread-safe, but not bound to one thread."""

    def __init__(self, directory: Path, sync: Sync) -> None:
        """Creates missing files. Raises JournalUnusable."""
        self.path = directory / DATABASE
        self.sync = sync
        self._lock = lock(directory)
        # The id of this gateway in table meta.
        self._owner = uuid.uuid4().hex
        self._stored_owner = _stored(_OWNER, self._owner)
        self._wal = self.path.with_name(self.path.name + "-wal")
        self._wal_identity: _Identity = None
        # Time and size of the database's file after this gateway has written to it.
        self._written: tuple[int, int] | None = None
        # Checked with every row. Strings, because a Path would cost three more function calls each.
        self._name, self._wal_name = str(self.path), str(self._wal)
        self.high_water_mark = HighWaterMark(directory / HIGH_WATER_MARK, sync)
        try:
            with translate_errors(self.path):
                self._prepare()
        except BaseException:
            os.close(self._lock)
            raise

    def connect(self) -> sqlite3.Connection:
        """Opens the database. Raises sqlite3.Error, or NotOwner if the file was replaced."""
        if _identity(self._name) != self._identity:
            raise _removed(self._name)
        db = self._connect("rw")
        try:
            _fetch_one(db, "PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {self.sync}")
            # The writer runs checkpoints itself, at idle times.
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
            # SQLite does not replace the file while a connection is open.
            self._wal_identity = _identity(self._wal_name)
            self.has_written()
        except BaseException:
            db.close()
            raise
        return db

    def has_written(self) -> None:
        """Notes the database's file as it is now. Only opening and checkpoints write to it."""
        try:
            found = os.stat(self._name)  # noqa: PTH116
        except OSError:
            return
        self._written = found.st_mtime_ns, found.st_size

    def require_unchanged(self) -> None:
        """Raises FileChanged if another program has written to the database's file."""
        try:
            found = os.stat(self._name)  # noqa: PTH116
        except OSError:
            # See `require_names`.
            return
        if (found.st_mtime_ns, found.st_size) != self._written and (
            found.st_dev,
            found.st_ino,
        ) == self._identity:
            raise FileChanged(errno.ESTALE, "another program has written to it", self._name)

    def require_rows(self, first_seq: int, last_seq: int) -> None:
        """Reads the file. Raises LostRows unless all these rows can be recovered, and sqlite3.Error."""
        rows = Recovery(_ignore, _ignore, first_seq, last_seq + 1, "table log", lambda _: _CHANGED)
        try:
            with contextlib.closing(self._connect("ro")) as db:
                (found,) = _fetch_one(db, "PRAGMA quick_check(1)")
                for row in db.execute(ROWS, (first_seq, last_seq)):
                    rows.add(*row)
            rows.end()
            if rows.torn is not None:
                raise rows.damaged(last_seq, str(rows.torn))
        except JournalUnusable as error:
            raise LostRows(errno.ESTALE, str(error), self._name) from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            found = str(error)
        if found != "ok":
            raise LostRows(errno.ESTALE, f"it is damaged ({found}). {_CHANGED}", self._name)

    def require_names(self) -> None:
        """Raises NotOwner if the database or its log was removed or replaced."""
        # Without `_identity` and Path, which would be function calls for each row.
        for name, identity in ((self._name, self._identity), (self._wal_name, self._wal_identity)):
            try:
                found = os.stat(name)  # noqa: PTH116
            except OSError:
                raise _removed(name) from None
            if (found.st_dev, found.st_ino) != identity:
                raise _removed(name)

    def require_owner(self, db: sqlite3.Connection) -> None:
        """Raises NotOwner if another gateway owns the journal, or sqlite3.Error. Needs a transaction."""
        if read_meta(db, _OWNER) != self._owner:
            raise NotOwner(errno.ESTALE, _TAKEN, str(self.path))

    def insert(self, db: sqlite3.Connection, last: int | None, seq: int, wall_ns: int, row: bytes) -> None:
        """Writes a row behind row `last`; None: behind none.

        Raises NotOwner if another gateway owns the journal, LostRows if it ends elsewhere, and sqlite3.Error.
        """
        # One statement, and so one transaction. Several would wait for the GIL several times.
        values = seq, wall_ns, row, _OWNER, self._stored_owner, last
        if not db.execute(_INSERT, values).rowcount:
            self.require_owner(db)
            (found,) = _fetch_one(db, "SELECT max(seq) FROM log")
            ends = f"it ends with row {found or 0} instead of {last or 0}. {_CHANGED}"
            raise LostRows(errno.ESTALE, ends, self._name)

    def close(self) -> None:
        """Closes the files and releases the lock."""
        self.high_water_mark.close()
        os.close(self._lock)

    def _prepare(self) -> None:
        if not self.path.exists():
            if self._wal.exists() or self.high_water_mark.seq():
                raise JournalUnusable(
                    f"{self.path} is missing, but others of its files are there. "
                    f"Bring it back; or, to begin without caches, remove what is left in {self.path.parent}."
                )
            _create(self.path)
        found = self.path.stat()
        self._identity = _identity(self._name)
        if not stat.S_ISREG(found.st_mode):
            raise JournalUnusable(f"{self.path} is not a regular file. Move it away.")
        with self.path.open("rb") as file:
            magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise JournalUnusable(
                f"{self.path} is not a database: it was truncated or overwritten. {_RESTORE}"
            )
        # Read-only, so that the write-ahead log stays unchanged if the journal is refused.
        with contextlib.closing(self._connect("ro")) as db:
            self._check_format(db)
            self._check_high_water_mark(db)
        with contextlib.closing(self.connect()) as db:
            # Checkpoint first: on a full disk there may be room only at the start of the write-ahead log.
            self.high_water_mark.write(last_seq(db), synced=checkpoint(db))
            # Also fails if the file cannot be written to.
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_OWNER, self._stored_owner))

    def _connect(self, mode: Literal["ro", "rw"]) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_S,
            # Autocommit, except in explicit transactions.
            isolation_level=None,
            check_same_thread=False,
        )

    def _check_high_water_mark(self, db: sqlite3.Connection) -> None:
        """Detects a lost log: SQLite treats a missing, empty or damaged one as one that ends earlier."""
        last, written = last_seq(db), self.high_water_mark.seq()
        if last < written:
            raise JournalUnusable(
                f"{self.path} ends with row {last}, but row {written} was written: {self._wal} was lost "
                "or damaged. Restore both files; or, to continue without the last rows, remove "
                f"{self.high_water_mark.path}."
            )

    def _check_format(self, db: sqlite3.Connection) -> None:
        (application,) = _fetch_one(db, "PRAGMA application_id")
        (version,) = _fetch_one(db, "PRAGMA user_version")
        if application != _APPLICATION_ID:
            raise JournalUnusable(f"{self.path} is a database of another program. Choose another directory.")
        if version > FORMAT:
            raise JournalUnusable(
                f"{self.path} has format {version}, and this version of Quire knows {FORMAT} at most. "
                "Use the version that wrote it, or a newer one; or another directory."
            )


class HighWaterMark:
    """Number of the last row that must exist, in a file of its own. It detects the loss of the last rows.

    After a crash of the system, rows after the last synced one may be missing, unless `sync` is "full".
    """

    _LAYOUT = struct.Struct("<QQ16s")

    def __init__(self, path: Path, sync: Sync) -> None:
        self.path = path
        self._sync = sync
        self._map: mmap.mmap | None = None
        self._synced = 0
        self._boot = _boot_id()

    def seq(self) -> int:
        """The last row that must exist; 0 if none must. Raises OSError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        if not any(data):
            # The system crashed before anything was written.
            return 0
        size = self._LAYOUT.size
        if len(data) != size + 4 or crc32(data[:size]) != int.from_bytes(data[size:], "little"):
            raise JournalUnusable(
                f"{self.path} is damaged, so the last rows of the journal may be missing. "
                "Restore the directory from a backup; or, to use the rows that are there, remove this file."
            )
        written, synced, boot = self._LAYOUT.unpack_from(data)
        same_boot = boot == self._boot and any(boot)
        return int(written if same_boot or self._sync == "full" else synced)

    def write(self, seq: int, *, synced: bool = False) -> None:
        """Stores `seq` as the last row. `synced`: it survives a crash of the system. Raises OSError."""
        if self._map is None:
            self._map = self._open()
        if synced or self._sync == "full":
            self._synced = seq
        data = self._LAYOUT.pack(seq, min(seq, self._synced), self._boot)
        # Memory-mapped: a system call would release the GIL, and a busy event loop holds it for milliseconds.
        self._map[:] = data + crc32(data).to_bytes(4, "little")

    def close(self) -> None:
        """Closes the file."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _open(self) -> mmap.mmap:
        size = self._LAYOUT.size + 4
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Reserves the disk space, so that later writes cannot fail.
            os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)


# Errors that a connection may raise. With a damaged file, SQLite's messages may not be valid UTF-8.
FAILURES: Final = (sqlite3.Error, OSError, UnicodeDecodeError, OverflowError, MemoryError)


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turns errors of SQLite and the system into JournalUnusable."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalUnusable(f"{path}: {error}. {_advice(error)}") from error
    except UnicodeDecodeError as error:
        # In an error message of SQLite.
        raise JournalUnusable(f"{path} is damaged. {_RESTORE}") from error
    except OSError as error:
        advice = "Make sure that it can be written to, and that the disk has room."
        if isinstance(error, FileExistsError | NotADirectoryError):
            advice = "It must be a directory, but is a file: choose another one with --data-dir."
        named = error.filename2 or error.filename or path  # of a copy that which is written
        raise JournalUnusable(f"{named}: {error.strerror}. {advice}") from error


def checkpoint(db: sqlite3.Connection) -> bool:
    """Copies the write-ahead log into the database. Whether all of it was copied. Raises sqlite3.Error."""
    busy, in_log, done = _fetch_one(db, "PRAGMA wal_checkpoint(PASSIVE)")
    return not busy and in_log == done


def data_version(db: sqlite3.Connection) -> int:
    """Changes when another connection has written to the database. Raises sqlite3.Error."""
    return int(_fetch_one(db, "PRAGMA data_version")[0])


def last_seq(db: sqlite3.Connection) -> int:
    """The number of the last row, even if it was dropped since. Raises sqlite3.Error."""
    (last,) = _fetch_one(db, "SELECT coalesce(max(seq), 0) FROM log")
    return max(int(last), first_seq(db) - 1)


def read_meta(db: sqlite3.Connection, key: str) -> str | None:
    """Reads a value of table meta and checks its checksum. Raises sqlite3.Error."""
    (stored,) = _fetch_one(db, "SELECT value FROM meta WHERE key = ?", key)
    if stored is None:
        return None
    value, _, checksum = str(stored).rpartition(" ")
    if checksum != _checksum(key, value):
        raise sqlite3.DatabaseError(f"the checksum of {key} in table meta differs")
    return value


def write_meta(db: sqlite3.Connection, key: str, value: int | str) -> None:
    """Writes a value of table meta. Raises sqlite3.Error."""
    db.execute("UPDATE meta SET value = ? WHERE key = ?", (_stored(key, value), key))


def first_seq(db: sqlite3.Connection) -> int:
    """The first row that is needed. Raises sqlite3.Error."""
    found = read_meta(db, "first_seq")
    if found is None:
        raise sqlite3.DatabaseError("table meta does not say which row is the first")
    return int(found)


def _ignore(_record: object, _wall_s: float) -> None:
    """Only whether a row can be recovered matters."""


def _stored(key: str, value: int | str) -> str:
    return f"{value} {_checksum(key, str(value))}"


def _checksum(key: str, value: str) -> str:
    return f"{crc32(f'{key} {value}'.encode()):08x}"


def _fetch_one(db: sqlite3.Connection, query: str, *values: object) -> tuple[Any, ...]:
    """The only row of the result. Raises sqlite3.Error."""
    row: tuple[Any, ...] | None = db.execute(query, values).fetchone()
    if row is None:
        raise sqlite3.DatabaseError("a required row is missing")
    return row


def _identity(name: str) -> _Identity:
    try:
        found = os.stat(name)  # noqa: PTH116 - see where names are kept
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _removed(name: str) -> NotOwner:
    return NotOwner(errno.ESTALE, "it was removed or replaced while it was in use", name)


def _boot_id() -> bytes:
    """An id that changes with each boot; zeros if the system has none."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def lock(directory: Path) -> int:
    """Locks a data directory, made if it is missing, until the result is closed. Raises JournalUnusable.

    In a directory of others the lock could be a link to any file, which is written to here.
    """
    path = directory / LOCK
    with translate_errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        locked = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(locked, 0)
            os.pwrite(locked, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(locked, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(locked)
            raise DirectoryInUse(
                f"{directory} is in use by another gateway, process {holder}. "
                "End it, or choose another directory."
            ) from None
        except BaseException:
            os.close(locked)
            raise
    return locked


def _create(path: Path) -> None:
    """Creates the database atomically: it gets its name when it is complete."""
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
