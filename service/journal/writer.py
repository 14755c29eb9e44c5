"""The thread that writes rows: what waits together becomes one row in one transaction.

It does not know records, nor the event loop: it is given bytes and functions to call with the outcome.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from service.journal.encoding import seal
from service.journal.files import FAILURES, Files, NotOurs, checkpoint, first_seq, last_seq, write_meta
from service.logging import get_logger

_log = get_logger(__name__)

# A row holds no more than that, unless one commit does.
_MAX_ROW_BYTES: Final = 8 << 20
# What is not dropped or brought into the database is, when nothing has been given for so long,
_IDLE_S: Final = 1.0
# or when the write-ahead log has become so large.
_WAL_BYTES: Final = 16 << 20
# A row in the database and in the write-ahead log but for its data, about.
ROW_BYTES: Final = 24
_WAL_ROW_BYTES: Final = 6 << 10
# At most so much is dropped between two rows that are written.
_DROP_ROWS: Final = 256
_DROP_BYTES: Final = 4 << 20
# Between warnings of the same failure.
_WARN_S: Final = 10.0


# Who is told what became of a batch.
Owner = TypeVar("Owner")


class _Batch(NamedTuple, Generic[Owner]):
    frames: bytes
    owner: Owner


class _Mark(NamedTuple):
    name: int


class _Drop(NamedTuple):
    name: int


class _Stop:
    pass


_Other = _Mark | _Drop | _Stop
# Told on the thread whose batches are durable, or are not there.
Report = Callable[[Sequence[Owner], bool], None]


class Writer(Generic[Owner]):
    """Owner of the connection from `start` on. Reports each batch once, in order."""

    def __init__(self, files: Files, db: sqlite3.Connection, report: Report[Owner]) -> None:
        """Raises sqlite3.Error."""
        self.next_seq = last_seq(db) + 1
        self.first_seq = first_seq(db)
        # Of rows that are needed, or were not dropped by a round of compaction yet.
        self.size_bytes = 0
        # Told to the database with the next row.
        self.model: str | None = None
        self._files = files
        self._db: sqlite3.Connection | None = db
        self._report = report
        self._queue: queue.SimpleQueue[_Batch[Owner] | _Other] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # By their names: the first row after a mark, and the size of what was there before.
        self._marks: dict[int, tuple[int, int]] = {}
        # Rows before `first_seq` may be there.
        self.is_dropping = True
        # The last mark up to which rows were, or are being, dropped; and the size of what was left then.
        self.dropped = 0
        self.kept_bytes = 0
        # After a failure, not before.
        self._drop_at = 0.0
        # Since the last checkpoint.
        self._wal_bytes = 0
        self._warned_at = -_WARN_S

    def give(self, frames: bytes, owner: Owner) -> None:
        """Writes it after all that was given before."""
        self._put(_Batch(frames, owner))

    def mark(self, name: int) -> None:
        """What is given from now on comes into other rows than what was given before."""
        self._put(_Mark(name))

    def drop(self, name: int) -> None:
        """Drops the rows before a mark."""
        self._put(_Drop(name))

    def stop(self, timeout_s: float) -> bool:
        """Writes what was given, and lets go of the database; False if that takes longer."""
        self._put(_Stop())
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _put(self, item: _Batch[Owner] | _Other) -> None:
        self._queue.put(item)
        if self._thread is None:
            # A daemon: a write that is stuck must not keep the process.
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._pause_s())
            except queue.Empty:
                self._tidy()
                continue
            batches, other = self._gather(item)
            if batches:
                self._commit(batches)
                if self._wal_bytes > _WAL_BYTES:
                    self._checkpoint()
                if self.is_dropping:
                    self._drop_some()
            match other:
                case _Mark(name):
                    self._marks = {name: (self.next_seq, self.size_bytes)}
                case _Drop(name):
                    self._begin_drop(name)
                case _Stop():
                    self._end()
                    return

    def _pause_s(self) -> float | None:
        if self.is_dropping:
            return max(0.0, self._drop_at - time.monotonic())
        return _IDLE_S if self._wal_bytes else None

    def _gather(self, item: _Batch[Owner] | _Other) -> tuple[list[_Batch[Owner]], _Other | None]:
        """What waits up to something else than a batch, and that."""
        batches: list[_Batch[Owner]] = []
        size = 0
        while isinstance(item, _Batch):
            batches.append(item)
            size += len(item.frames)
            if size > _MAX_ROW_BYTES:
                return batches, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batches, None
        return batches, item

    def _commit(self, batches: list[_Batch[Owner]]) -> None:
        wall_ns = time.time_ns()
        durable = False
        try:
            row = seal([batch.frames for batch in batches], self.next_seq, wall_ns)
            durable = self._write(row, wall_ns)
            if durable:
                self.next_seq += 1
                self.size_bytes += ROW_BYTES + len(row)
                self._wal_bytes += _WAL_ROW_BYTES + len(row)
        except BaseException as error:
            # Whatever it is: those who wait are told, and the next ones can be written.
            self._warn("a write to the journal failed", error)
            self._disconnect()
        self._report([batch.owner for batch in batches], durable)

    def _write(self, row: bytes, wall_ns: int) -> bool:
        """Whether the row is durable; if not it will not be found."""
        try:
            if self._db is None:
                self._reopen()
            self._insert_where_there_is_room(row, wall_ns)
            # Someone may have removed a file, and what was written with it.
            self._files.require_names()
        except FAILURES as error:
            self._warn("a write to the journal failed", error)
            if not self._is_written(row, wall_ns, error):
                return False
        self._raise_floor()
        return True

    def _insert_where_there_is_room(self, row: bytes, wall_ns: int) -> None:
        try:
            self._insert(row, wall_ns)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_FULL":
                raise
            # It may be the write-ahead log that fills the disk: after a checkpoint it begins anew.
            self._checkpoint()
            self._insert(row, wall_ns)

    def _insert(self, row: bytes, wall_ns: int) -> None:
        assert self._db is not None
        if self.model is None:
            self._files.insert(self._db, self.next_seq, wall_ns, row)
            return
        with _Transaction(self._db):
            write_meta(self._db, "model", self.model)
            self._files.insert(self._db, self.next_seq, wall_ns, row)
        self.model = None

    def _is_written(self, row: bytes, wall_ns: int, error: Exception) -> bool:
        """After a failure: whether the row is there all the same. If that cannot be told it will not be."""
        if self._db is None:
            return False
        lost = isinstance(error, NotOurs)
        try:
            query = "SELECT 1 FROM log WHERE seq = ? AND wall_ns = ? AND data = ?"
            if not lost and self._db.execute(query, (self.next_seq, wall_ns, row)).fetchone():
                return True
            if lost or getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
                # It may lie in the log, whole but not synchronised, and be taken for a row after a crash; or
                # be found when a file that was moved is brought back.
                self._overwrite(self._db)
        except FAILURES:
            # The next row is written to a new connection, after what may have come of this one was removed.
            lost = True
        if lost:
            self._disconnect()
        return False

    def _reopen(self) -> None:
        """Raises sqlite3.Error. Rows that were reported as failed are not there afterwards."""
        db = self._files.connect()
        try:
            self._overwrite(db)
        except BaseException:
            db.close()
            raise
        self._db = db

    def _overwrite(self, db: sqlite3.Connection) -> None:
        with _Transaction(db):
            self._files.require_owner(db)
            db.execute("DELETE FROM log WHERE seq >= ?", (self.next_seq,))
            write_meta(db, "first_seq", self.first_seq)

    def _disconnect(self) -> None:
        if self._db is not None:
            try:
                self._db.close()
            except FAILURES as error:
                self._warn("the journal's file could not be closed", error)
            self._db = None

    def _raise_floor(self) -> None:
        try:
            self._files.floor.write(self.next_seq)
        except OSError as error:
            # It stays lower than it could be, which is true, too.
            self._warn("the journal's floor could not be written", error)

    def _begin_drop(self, name: int) -> None:
        if name in self._marks:
            self.first_seq, size_bytes = self._marks.pop(name)
            self.size_bytes -= size_bytes
            self.is_dropping = True
        self.kept_bytes = self.size_bytes
        self.dropped = name

    def _tidy(self) -> None:
        if self.is_dropping:
            self._drop_some()
        elif self._wal_bytes:
            self._checkpoint()

    def _drop_some(self) -> None:
        """Drops the oldest rows, having written that all before the mark are void."""
        if time.monotonic() < self._drop_at:
            return
        try:
            if self._db is None:
                self._reopen()
            assert self._db is not None
            query = "SELECT seq, length(data) FROM log WHERE seq < ? ORDER BY seq LIMIT ?"
            last, size = 0, 0
            for seq, length in self._db.execute(query, (self.first_seq, _DROP_ROWS)).fetchall():
                last = seq
                size += length
                if size > _DROP_BYTES:
                    break
            with _Transaction(self._db):
                self._files.require_owner(self._db)
                write_meta(self._db, "first_seq", self.first_seq)
                self._db.execute("DELETE FROM log WHERE seq <= ?", (last,))
            self._wal_bytes += _WAL_ROW_BYTES
            self.is_dropping = last > 0
        except FAILURES as error:
            self._drop_at = time.monotonic() + _IDLE_S
            self._warn("rows of the journal could not be dropped", error)

    def _checkpoint(self) -> None:
        # If it fails or someone reads the file, only when so much has been written again.
        self._wal_bytes = 0
        if self._db is None:
            return
        try:
            if checkpoint(self._db, "PASSIVE"):
                self._files.floor.write(self.next_seq - 1, synced=True)
        except FAILURES as error:
            self._warn("a checkpoint of the journal failed", error)

    def _end(self) -> None:
        self._checkpoint()
        self._disconnect()

    def _warn(self, event: str, error: BaseException | None = None) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_S:
            self._warned_at = now
            _log.warning(event, file=str(self._files.path), error=None if error is None else str(error))


class _Transaction:
    """All that is done within, or nothing. Leaves errors to its user."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
                return
            except FAILURES:
                self._roll_back()
                raise
        self._roll_back()

    def _roll_back(self) -> None:
        # Some failures have rolled back already.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
