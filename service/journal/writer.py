"""The thread that writes rows. All queued commits become one row in one transaction.

It gets encoded records, and reports results through a callback on its own thread.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Final

from service.journal.encoding import seal
from service.journal.files import FAILURES, Files, NotOwner, checkpoint, first_seq, last_seq, write_meta
from service.logging import get_logger

_log = get_logger(__name__)

# A row is closed when it is larger than this.
_MAX_ROW_BYTES: Final = 8 << 20
# A checkpoint runs after so long without commits,
_IDLE_S: Final = 1.0
# or when the write-ahead log has grown by so much.
_WAL_BYTES: Final = 16 << 20
# Approximate overhead of a row in the database and in the write-ahead log.
ROW_BYTES: Final = 24
_WAL_ROW_BYTES: Final = 6 << 10
# Limits of the rows that are dropped after each written row.
_DROP_ROWS: Final = 256
_DROP_BYTES: Final = 4 << 20
# Minimum time between two warnings.
_WARN_S: Final = 10.0


# The frames of a commit, or what runs on the thread between commits.
_Item = bytes | Callable[[], None]
# Called on the thread with a number of commits, the oldest that were not reported yet. True: they are
# durable. False: none of them is stored.
OnWritten = Callable[[int, bool], None]


class Writer:
    """Owner of the connection. Reports each commit once, in order."""

    def __init__(self, files: Files, db: sqlite3.Connection, on_written: OnWritten) -> None:
        """Raises sqlite3.Error."""
        self.next_seq = last_seq(db) + 1
        # Earlier rows are not needed, and are dropped. Changed only by `drop`.
        self.first_seq = first_seq(db)
        # Size of all rows that were written or recovered, including dropped ones.
        self.written_bytes = 0
        # A new model tag, which is stored with the next row.
        self.model: str | None = None
        self._files = files
        self._db: sqlite3.Connection | None = db
        self._on_written = on_written
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        # The database may contain rows before `first_seq`.
        self.is_dropping = True
        # Next time to drop rows, after a failure.
        self._drop_at = 0.0
        # Bytes since the last checkpoint.
        self._wal_bytes = 0
        self._warned_at = -_WARN_S

    def drop(self, first_seq: int) -> None:
        """Drops the rows before `first_seq`. To be called only when earlier rows are dropped."""
        self.first_seq, self.is_dropping = first_seq, True
        self.append(self._drop_rows)

    def stop(self, timeout_s: float) -> bool:
        """Writes all queued commits and closes the database. False after the timeout."""
        self.append(self._end)
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def append(self, item: _Item) -> None:
        """Queues the frames of a commit; or what runs on the thread after them."""
        self._queue.put(item)
        if self._thread is None:
            # A daemon thread, because a blocked write must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._has_ended:
            try:
                item = self._queue.get(timeout=self._pause_s())
            except queue.Empty:
                self._run_maintenance()
                continue
            commits, then = self._take_commits(item)
            if commits:
                self._commit(commits)
                if self._wal_bytes > _WAL_BYTES:
                    self._checkpoint()
                if self.is_dropping:
                    self._drop_rows()
            if then is not None:
                then()

    def _pause_s(self) -> float | None:
        if self.is_dropping:
            return max(0.0, self._drop_at - time.monotonic())
        return _IDLE_S if self._wal_bytes else None

    def _take_commits(self, item: _Item) -> tuple[list[bytes], Callable[[], None] | None]:
        """Takes queued commits up to the size limit or the next function. Returns that, too."""
        commits: list[bytes] = []
        size = 0
        while isinstance(item, bytes):
            commits.append(item)
            size += len(item)
            if size > _MAX_ROW_BYTES:
                return commits, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return commits, None
        return commits, item

    def _commit(self, commits: list[bytes]) -> None:
        wall_ns = time.time_ns()
        durable = False
        try:
            row = seal(commits, self.next_seq, wall_ns)
            durable = self._write(row, wall_ns)
            if durable:
                self.next_seq += 1
                self.written_bytes += ROW_BYTES + len(row)
                self._wal_bytes += _WAL_ROW_BYTES + len(row)
        except BaseException as error:
            # Whatever it is: the commits are reported, and later ones can be written.
            self._warn("a write to the journal failed", error)
            self._disconnect()
        self._on_written(len(commits), durable)

    def _write(self, row: bytes, wall_ns: int) -> bool:
        """Writes a row. Whether it is durable. If not, recovery will not find it."""
        try:
            if self._db is None:
                self._reopen()
            try:
                self._insert(row, wall_ns)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_FULL":
                    raise
                # The write-ahead log may fill the disk. After a checkpoint it is written from its start.
                self._checkpoint()
                self._insert(row, wall_ns)
            # If a file was removed, the row is lost.
            self._files.require_names()
        except FAILURES as error:
            self._warn("a write to the journal failed", error)
            # On a full disk, or while another program has a lock, nothing was written.
            if getattr(error, "sqlite_errorname", "") not in ("SQLITE_FULL", "SQLITE_BUSY"):
                self._take_back(lost=isinstance(error, NotOwner))
            return False
        try:
            self._files.high_water_mark.write(self.next_seq)
        except OSError as error:
            # A lower mark than possible is still correct.
            self._warn("the journal's high-water mark could not be written", error)
        return True

    def _insert(self, row: bytes, wall_ns: int) -> None:
        assert self._db is not None
        if self.model is None:
            self._files.insert(self._db, self.next_seq, wall_ns, row)
            return
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            write_meta(self._db, "model", self.model)
            self._files.insert(self._db, self.next_seq, wall_ns, row)
        self.model = None

    def _take_back(self, *, lost: bool) -> None:
        """Removes the row that may have been written despite a failure. `lost`: its file was removed."""
        try:
            # Also from a lost file, which may be moved back.
            if self._db is not None:
                self._overwrite(self._db)
        except FAILURES:
            lost = True
        if lost:
            # The next write opens a new connection, which first removes this row.
            self._disconnect()

    def _reopen(self) -> None:
        """Opens a connection and removes rows that were reported as failed. Raises sqlite3.Error."""
        db = self._files.connect()
        try:
            self._overwrite(db)
        except BaseException:
            db.close()
            raise
        self._db = db

    def _overwrite(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        with db:
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

    def _run_maintenance(self) -> None:
        if self.is_dropping:
            self._drop_rows()
        elif self._wal_bytes:
            self._checkpoint()

    def _drop_rows(self) -> None:
        """Drops some of the rows before `first_seq`, and stores `first_seq` in the same transaction."""
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
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                self._files.require_owner(self._db)
                write_meta(self._db, "first_seq", self.first_seq)
                self._db.execute("DELETE FROM log WHERE seq <= ?", (last,))
            self._wal_bytes += _WAL_ROW_BYTES
            self.is_dropping = last > 0
        except FAILURES as error:
            self._drop_at = time.monotonic() + _IDLE_S
            self._warn("rows of the journal could not be dropped", error)

    def _checkpoint(self) -> None:
        # Also after a failure: the next attempt is after as many bytes again.
        self._wal_bytes = 0
        if self._db is None:
            return
        try:
            if checkpoint(self._db):
                self._files.high_water_mark.write(self.next_seq - 1, synced=True)
        except FAILURES as error:
            self._warn("a checkpoint of the journal failed", error)

    def _end(self) -> None:
        self._has_ended = True
        self._checkpoint()
        self._disconnect()

    def _warn(self, event: str, error: BaseException | None = None) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_S:
            self._warned_at = now
            _log.warning(event, file=str(self._files.path), error=None if error is None else str(error))
