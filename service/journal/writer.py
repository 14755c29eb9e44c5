"""Writes rows: on a thread, where all queued commits become one row in one transaction; or at once.

It gets encoded records, and reports results of the thread through a callback there. A commit is written at
once, on the event loop, where that takes less than to wake the thread and to be woken by it: see ADR 35.
"""

from __future__ import annotations

import errno
import functools
import math
import queue
import resource
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Final

from service.journal.encoding import seal
from service.journal.files import (
    BUSY_S,
    FAILURES,
    FileChanged,
    Files,
    LostRows,
    NotOwner,
    checkpoint,
    data_version,
    first_seq,
    last_seq,
    write_meta,
)
from service.journal.recovery import ROW_BYTES
from service.journal.stored import MAX_ROW_BYTES, OnWritten
from service.logging import RareWarnings

# A checkpoint runs after so long without commits,
_IDLE_S: Final = 1.0
# or when the write-ahead log has grown by so much.
_WAL_BYTES: Final = 16 << 20
# Approximate overhead of a row in the write-ahead log.
_WAL_ROW_BYTES: Final = 6 << 10
# Limits of the rows that are dropped after each written row.
_DROP_ROWS: Final = 256
_DROP_BYTES: Final = 4 << 20
# A longer commit is for the thread.
_SHORT_BYTES: Final = 64 << 10
# The next commit can be written at once after a multiple of the time that this one took: see ADR 35.
_SHORT_S: Final = 0.002
_PAUSE: Final = 4
_PAUSE_FOR_DISK: Final = 1000


# The frames of a commit, or what runs on the thread between commits.
_Item = bytes | Callable[[], None]


class Writer:
    """See `RowWriter`. Owner of the connection. Reports each commit once, in order."""

    def __init__(
        self, files: Files, db: sqlite3.Connection, on_written: OnWritten, on_loss: Callable[[], None]
    ) -> None:
        """`on_written` is called on the thread, and `on_loss` once `loss` is set. Raises sqlite3.Error."""
        self.next_seq = last_seq(db) + 1
        # Why nothing can be written any more, for ever.
        self.loss = ""
        # The last row, which is never dropped. None: an earlier version has dropped it.
        self._last = _last_row(db)
        # Earlier rows are not needed, and are dropped. Changed only by `drop`.
        self.first_seq = first_seq(db)
        self.written_bytes = 0
        self.model: str | None = None
        self._files = files
        self._db: sqlite3.Connection | None = db
        self._data_version = data_version(db)
        self._on_written = on_written
        self._on_loss = on_loss
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self.is_dropping = True
        # Next time to drop rows, after a failure.
        self._drop_at = 0.0
        # Bytes since the last checkpoint, and when the next one is due.
        self._wal_bytes = 0
        self._checkpoint_at = 0.0
        self._warn = RareWarnings(__name__, file=str(files.path))
        # Held by whoever uses the connection; and whether that waits for locks of other programs.
        self._using = threading.Lock()
        self._waits_for_locks = True
        # No commit is written at once before.
        self._at_once_from = math.inf if files.sync == "full" else 0.0

    def dropped_last_row(self, db: sqlite3.Connection) -> None:
        """The last row was removed before anything was written. Raises sqlite3.Error."""
        self.next_seq, self._last = last_seq(db) + 1, _last_row(db)

    def drop(self, first_seq: int) -> None:
        """See `RowWriter.drop`."""
        self.first_seq, self.is_dropping = first_seq, True
        self.append(self._drop_rows)

    def stop(self, timeout_s: float) -> bool:
        """Writes all queued commits and closes the database. False after the timeout."""
        self.append(self._end)
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def append(self, item: _Item) -> None:
        """Queues the frames of a commit, or what runs on the thread after them."""
        self._queue.put(item)
        if self._thread is None:
            # A daemon thread, because a blocked write must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()

    def write(self, frames: bytes, *, at_once: bool) -> bool:
        """See `RowWriter.write`."""
        item: _Item = frames
        began_at = time.monotonic()
        if (
            at_once
            and self._db is not None
            and not self.loss
            and began_at >= self._at_once_from
            # The first commit after a checkpoint syncs the header of the log.
            and 0 < self._wal_bytes <= _WAL_BYTES
            and not self.is_dropping
            and self.model is None
            and len(frames) <= _SHORT_BYTES
            and self._using.acquire(blocking=False)
        ):
            blocked, computed_s = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.process_time()
            try:
                if self._waits_for_locks:
                    self._set_waiting(for_locks=False)
                self._store([frames])
                return True
            except BaseException as error:
                # Whatever it is. The thread may wait: for another program, or for the disk, also to take back
                # the row.
                if not _is_unwritten(error):
                    item = functools.partial(self._give_up, error)
            finally:
                self._using.release()
                took_s = time.monotonic() - began_at
                waited_for_disk = (
                    # Neither for Python's lock, while another thread computed, nor for the CPU.
                    took_s - (time.process_time() - computed_s) > _SHORT_S
                    and resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > blocked
                )
                self._at_once_from = began_at + took_s * (_PAUSE_FOR_DISK if waited_for_disk else _PAUSE)
        self.append(item)
        return False

    def _set_waiting(self, *, for_locks: bool) -> None:
        """Whether to wait for the locks of other programs, such as an operator's shell."""
        if self._db is not None:
            self._db.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000) if for_locks else 0}")
        self._waits_for_locks = for_locks

    def _run(self) -> None:
        while not self._has_ended:
            try:
                item = self._queue.get(timeout=self._pause_s())
            except queue.Empty:
                item = self._run_maintenance
            with self._using:
                self._work(item)

    def _work(self, item: _Item) -> None:
        if not self._waits_for_locks:
            # Nothing but memory is changed by it, so it cannot fail.
            self._set_waiting(for_locks=True)
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
        if self.is_dropping or self._wal_bytes:
            due_at = self._drop_at if self.is_dropping else self._checkpoint_at
            return max(0.0, due_at - time.monotonic())
        return None

    def _take_commits(self, item: _Item) -> tuple[list[bytes], Callable[[], None] | None]:
        """Takes queued commits up to the size limit or the next function. Returns that, too."""
        commits: list[bytes] = []
        size = 0
        while isinstance(item, bytes):
            commits.append(item)
            size += len(item)
            if size > MAX_ROW_BYTES:
                return commits, None
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return commits, None
        return commits, item

    def _commit(self, commits: list[bytes]) -> None:
        durable = False
        try:
            if self.loss:
                raise LostRows(errno.ESTALE, self.loss)
            if self._db is None:
                self._reopen()
            try:
                self._store(commits)
            except FileChanged:
                # What the connection has in memory may be old.
                self._files.require_rows(self.first_seq, self.next_seq - 1)
                self._disconnect()
                self._reopen()
                self._store(commits)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_FULL":
                    raise
                # The write-ahead log may fill the disk. After a checkpoint it is written from its start.
                self._checkpoint()
                self._store(commits)
            durable = True
        except BaseException as error:
            # Whatever it is: the commits are reported, and later ones can be written.
            self._failed(error)
        self._on_written(len(commits), durable)

    def _give_up(self, error: BaseException) -> None:
        """A commit that was to be written at once has failed."""
        self._failed(error)
        self._on_written(1, False)

    def _failed(self, error: BaseException) -> None:
        """A row could not be written: recovery must not find it."""
        self._warn("a write to the journal failed", error)
        if isinstance(error, LostRows):
            if not self.loss:
                self.loss = f"{error.filename}: {error.strerror}"
                self._on_loss()
        elif not isinstance(error, FAILURES):
            self._disconnect()
        elif not _is_unwritten(error):
            self._take_back(lost=isinstance(error, NotOwner))

    def _store(self, commits: list[bytes]) -> None:
        """Writes a row. If it raises, the row may have been written: see `_failed`."""
        wall_ns = time.time_ns()
        row = seal(commits, self.next_seq, wall_ns)
        db = self._db
        assert db is not None
        self._files.require_unchanged()
        if self.model is None:
            self._files.insert(db, self._last, self.next_seq, wall_ns, row)
        else:
            self._insert_with_model(db, row, wall_ns)
        # If a file was removed, the row is lost.
        self._files.require_names()
        try:
            self._files.high_water_mark.write(self.next_seq)
        except OSError as error:
            # A lower mark than possible is still correct.
            self._warn("the journal's high-water mark could not be written", error)
        self._last = self.next_seq
        self.next_seq += 1
        self.written_bytes += ROW_BYTES + len(row)
        self._wal_bytes += _WAL_ROW_BYTES + len(row)
        self._checkpoint_at = time.monotonic() + _IDLE_S

    def _insert_with_model(self, db: sqlite3.Connection, row: bytes, wall_ns: int) -> None:
        db.execute("BEGIN IMMEDIATE")
        with db:
            write_meta(db, "model", self.model or "")
            self._files.insert(db, self._last, self.next_seq, wall_ns, row)
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
        """Opens a connection and removes rows that were reported as failed.

        Raises sqlite3.Error, NotOwner or LostRows.
        """
        db = self._files.connect()
        try:
            self._files.require_rows(self.first_seq, self.next_seq - 1)
            self._overwrite(db)
        except BaseException:
            db.close()
            raise
        self._db, self._waits_for_locks, self._data_version = db, True, data_version(db)

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
        elif self._wal_bytes and time.monotonic() >= self._checkpoint_at:
            self._checkpoint()

    def _drop_rows(self) -> None:
        """Drops some of the rows before `first_seq`, and stores `first_seq` in the same transaction."""
        if time.monotonic() < self._drop_at:
            return
        if self.loss:
            self.is_dropping = False
            return
        try:
            if self._db is None:
                self._reopen()
            assert self._db is not None
            self._files.require_unchanged()
            query = "SELECT seq, length(data) FROM log WHERE seq < ? ORDER BY seq LIMIT ?"
            last, size = 0, 0
            # The last row shows that none is lost.
            end_seq = min(self.first_seq, self.next_seq - 1)
            for seq, length in self._db.execute(query, (end_seq, _DROP_ROWS)).fetchall():
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
        except LostRows as error:
            self._failed(error)
        except FAILURES as error:
            self._drop_at = time.monotonic() + _IDLE_S
            self._warn("rows of the journal could not be dropped", error)

    def _checkpoint(self) -> None:
        # Also after a failure: the next attempt is after as many bytes again.
        self._wal_bytes = 0
        if self._db is None or self.loss:
            return
        try:
            self._files.require_unchanged()
            version = data_version(self._db)
            if version != self._data_version:
                # Another program has written by way of SQLite: this checkpoint would bring it into the file.
                self._files.require_rows(self.first_seq, self.next_seq - 1)
                self._data_version = version
            try:
                is_complete = checkpoint(self._db)
            finally:
                self._files.has_written()
            if is_complete:
                self._files.high_water_mark.write(self.next_seq - 1, synced=True)
        except LostRows as error:
            self._failed(error)
        except FAILURES as error:
            self._warn("a checkpoint of the journal failed", error)

    def _end(self) -> None:
        self._has_ended = True
        self._checkpoint()
        self._disconnect()


def _last_row(db: sqlite3.Connection) -> int | None:
    """The number of the last row that is there. Raises sqlite3.Error."""
    (last,) = db.execute("SELECT max(seq) FROM log").fetchone()
    return None if last is None else int(last)


def _is_unwritten(error: BaseException) -> bool:
    """Whether nothing was written: on a full disk, or while another program has a lock or has changed it."""
    name = getattr(error, "sqlite_errorname", "")
    return isinstance(error, FileChanged) or name in ("SQLITE_FULL", "SQLITE_BUSY")
