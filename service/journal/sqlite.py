"""A journal in an SQLite database. Records survive a crash of the gateway; with `sync` "full", of the system.

With "normal", a crash of the system may lose the commits of the last second or, under load, since the last
checkpoint. It never loses earlier ones, so that the journal has no gaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Final

from service.journal.base import OwnershipLost
from service.journal.encoding import CorruptRecord
from service.journal.files import ROWS, Files, Sync, read_meta, translate_errors
from service.journal.recovery import Apply, ApplyRun, Recovery
from service.journal.stored import COMPACTION_BYTES, StoredJournal
from service.journal.writer import Writer
from service.logging import get_logger

_log = get_logger(__name__)

_CLOSE_S: Final = 5.0


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


class SqliteJournal(StoredJournal):
    """Owner of its files, which are locked until it is closed."""

    _writer: Writer

    def __init__(self, files: Files, db: sqlite3.Connection, compaction_bytes: int) -> None:
        """Raises sqlite3.Error."""
        self._files = files
        self._db = db
        self._lost = asyncio.Event()
        super().__init__(Writer(files, db, self._on_written, self._on_loss), compaction_bytes)
        self.model_fingerprint = read_meta(db, "model")

    def recover(self, apply: Apply, apply_run: ApplyRun) -> None:
        """Applies all records; those of a cache and of its forks in order. To be called before any commit.

        `apply_run` gets consecutive appends of one token, merged into one record: see `Ledger.apply_run`.
        Raises JournalUnusable, maybe after some records.
        """
        writer = self._writer
        place = str(self._files.path)
        recovery = Recovery(apply, apply_run, writer.first_seq, writer.next_seq, place, self._advice)
        with translate_errors(self._files.path):
            bounds = writer.first_seq, writer.next_seq - 1
            with contextlib.closing(self._db.execute(ROWS, bounds)) as rows:
                for seq, wall_ns, row in rows:
                    recovery.add(seq, wall_ns, row)
                recovery.end()
            if recovery.torn is not None:
                self._drop_last_row(writer.next_seq - 1, recovery.torn)
        writer.written_bytes += recovery.size_bytes

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
        self._writer.dropped_last_row(self._db)

    def _advice(self, damaged_seq: int) -> str:
        return (
            "Restore the directory from a backup; or, to keep the rows before it, remove "
            f"{self._files.high_water_mark.path} and the rows of table log with seq >= {damaged_seq}; or, to "
            "start without caches, move the directory away."
        )

    async def run(self) -> None:
        """See `Journal.run`. Raises OwnershipLost if rows were lost: the next start says what can be done."""
        await self._lost.wait()
        _log.error("the journal has lost rows", error=self._writer.loss)
        raise OwnershipLost(self._writer.loss)

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

    def _on_loss(self) -> None:
        """Called on the writer's thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lost.set)
