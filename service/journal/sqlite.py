"""A journal in an SQLite database. Records survive a crash of the gateway; with `sync` "full", of the system.

With "normal", a crash of the system may lose the commits of the last second or, under load, since the last
checkpoint. It never loses earlier ones, so that the journal has no gaps.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from service.caches.ledger import RecordConflict
from service.caches.records import Record
from service.journal.base import Journal, JournalUnusable, OnCommitted
from service.journal.encoding import CorruptRecord, NewerFormat, encode
from service.journal.files import Files, Sync, read_meta, translate_errors
from service.journal.recovery import Apply, ApplyRun, Replay
from service.journal.writer import ROW_BYTES, Writer
from service.logging import get_logger

_log = get_logger(__name__)

# Fewer obsolete bytes are not worth a compaction pass.
COMPACTION_BYTES: Final = 8 << 20
_CLOSE_S: Final = 5.0
# After callbacks for so many bytes of records, which take a few milliseconds, other tasks run.
_CALLBACK_SLICE_BYTES: Final = 1 << 12


class _PendingCommit(NamedTuple):
    size_bytes: int
    given_at: float
    on_committed: OnCommitted


def open_journal(
    directory: Path, sync: Sync = "normal", compaction_bytes: int = COMPACTION_BYTES
) -> SqliteJournal:
    """Opens or creates the journal in a directory. Raises JournalUnusable."""
    files = Files(directory, sync)
    try:
        with translate_errors(files.path):
            return SqliteJournal(files, files.connect(), compaction_bytes)
    except BaseException:
        files.close()
        raise


class SqliteJournal(Journal):
    """Owner of its files, which are locked until it is closed."""

    def __init__(self, files: Files, db: sqlite3.Connection, compaction_bytes: int) -> None:
        """Raises sqlite3.Error."""
        self._files = files
        self._db = db
        self._writer = Writer(files, db, self._on_written)
        self.model_fingerprint = read_meta(db, "model")
        self._compaction_bytes = compaction_bytes
        self._loop: asyncio.AbstractEventLoop
        # Commits whose callbacks have not run. Those of the first ones are due: whether these are durable.
        self._waiting: collections.deque[_PendingCommit] = collections.deque()
        self._finished: collections.deque[bool] = collections.deque()
        # The mark of the last compaction: the first row after it, and the size of all rows before that one.
        self._mark = (0, 0)
        # Size of the dropped rows, and of the others when they were dropped.
        self._dropped_bytes = 0
        self._kept_bytes = 0
        self._closed = False

    def recover(self, apply: Apply, apply_run: ApplyRun) -> None:
        """Applies all records; those of a cache and of its forks in order. To be called before any commit.

        `apply_run` gets consecutive appends of one token, merged into one record: see `Ledger.apply_run`.
        Raises JournalUnusable, maybe after some records.
        """
        replay = Replay(apply, apply_run)
        seq = expected = self._writer.first_seq
        torn: CorruptRecord | None = None
        with translate_errors(self._files.path):
            query = "SELECT seq, wall_ns, data FROM log WHERE seq >= ? ORDER BY seq"
            with contextlib.closing(self._db.execute(query, (expected,))) as rows:
                try:
                    for seq, wall_ns, row in rows:
                        if seq != expected:
                            raise self._damaged(expected, "it is missing")
                        torn = self._replay_row(replay, seq, wall_ns, row)
                        if torn is not None:
                            break
                        expected += 1
                    replay.flush()
                except RecordConflict as error:
                    what = f"the records up to this row conflict: {error}"
                    raise self._damaged(seq, what) from None
            if torn is not None:
                self._drop_last_row(expected, torn)
        if expected != self._writer.next_seq:
            raise self._damaged(expected, "it is missing")

    def _replay_row(self, replay: Replay, seq: int, wall_ns: object, row: object) -> CorruptRecord | None:
        """Replays a row. Returns the error if the last row is corrupt. Raises JournalUnusable for others."""
        try:
            if not isinstance(wall_ns, int) or not isinstance(row, bytes):
                raise CorruptRecord(0, "a column has the wrong type")
            replay.add(row, seq, wall_ns)
        except NewerFormat as error:
            raise JournalUnusable(
                f"{self._files.path}, row {seq}: {error}. Use the version of Quire that wrote it."
            ) from None
        except CorruptRecord as error:
            if seq + 1 == self._writer.next_seq:
                return error
            raise self._damaged(seq, str(error)) from None
        self._writer.written_bytes += ROW_BYTES + len(row)
        return None

    def _drop_last_row(self, seq: int, error: CorruptRecord) -> None:
        """Drops the last row, which was written only in part. Raises sqlite3.Error, OSError."""
        _log.warning(
            "the last row of the journal is damaged and was dropped",
            file=str(self._files.path),
            row=seq,
            error=str(error),
        )
        self._files.high_water_mark.write(seq - 1)
        self._db.execute("DELETE FROM log WHERE seq >= ?", (seq,))
        self._writer.next_seq = seq

    def _damaged(self, seq: int, what: str) -> JournalUnusable:
        return JournalUnusable(
            f"{self._files.path}, row {seq}: {what}. Restore the directory from a backup; or, to keep the "
            f"rows before it, remove {self._files.high_water_mark.path} and the rows of table log with "
            f"seq >= {seq}; or, to start without caches, move the directory away."
        )

    def bind_model(self, fingerprint: str) -> None:
        """See `Journal.bind_model`."""
        if fingerprint != self.model_fingerprint:
            self.model_fingerprint = self._writer.model = fingerprint

    @property
    def oldest_waiting_s(self) -> float:
        """See `Journal.oldest_waiting_s`."""
        return time.monotonic() - self._waiting[0].given_at if self._waiting else 0.0

    @property
    def size_bytes(self) -> int:
        """Size of all rows that were not dropped."""
        return self._writer.written_bytes - self._dropped_bytes

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        try:
            frames = encode(records)
        except ValueError:
            # A bug of ours: a value is out of its range.
            _log.exception("records could not be encoded")
            on_committed(False)
            return
        if self._closed:
            on_committed(False)
            return
        self._loop = asyncio.get_running_loop()
        self._waiting.append(_PendingCommit(len(frames), time.monotonic(), on_committed))
        self._writer.append(frames)

    def wants_compaction(self, live_bytes: int) -> bool:
        """See `Journal.wants_compaction`."""
        # Restated caches do not share all that the ledger shares, so a pass may keep more than `live_bytes`.
        limit_bytes = max(2 * live_bytes, self._kept_bytes) + self._compaction_bytes
        return self.size_bytes > limit_bytes and not self._writer.is_dropping

    def begin_compaction(self) -> None:
        """See `Journal.begin_compaction`."""
        # The thread has nothing to write, so that these values belong together.
        self._mark = (self._writer.next_seq, self._writer.written_bytes)

    def end_compaction(self) -> None:
        """See `Journal.end_compaction`."""
        first_seq, self._dropped_bytes = self._mark
        self._kept_bytes = self.size_bytes
        self._writer.drop(first_seq)

    def close(self) -> None:
        """See `Journal.close`. Callbacks run afterwards, on the event loop."""
        if self._closed:
            return
        self._closed = True
        if self._writer.stop(_CLOSE_S):
            self._files.close()
        else:
            _log.error("timeout while writing the rest of the journal", file=str(self._files.path))

    def _on_written(self, commits: int, durable: bool) -> None:
        """Called on the writer's thread."""
        try:
            self._loop.call_soon_threadsafe(self._finish, commits, durable)
        except RuntimeError:
            # The loop is closed. `contextlib.suppress` would be three calls for each commit.
            return

    def _finish(self, commits: int, durable: bool) -> None:
        is_running = bool(self._finished)
        self._finished += [durable] * commits
        if not is_running:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Runs callbacks in order. After a time slice it yields to other tasks."""
        done_bytes = 0
        while self._finished:
            if done_bytes >= _CALLBACK_SLICE_BYTES:
                self._loop.call_soon(self._run_callbacks)
                return
            commit, durable = self._waiting.popleft(), self._finished.popleft()
            done_bytes += commit.size_bytes
            if self.on_latency is not None and durable:
                self.on_latency(time.monotonic() - commit.given_at)
            try:
                commit.on_committed(durable)
            except Exception:
                # A bug of ours, which must not stop the other callbacks.
                _log.exception("the callback of a commit failed")
