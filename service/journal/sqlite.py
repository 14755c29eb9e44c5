"""A journal in a database of SQLite: records survive the gateway, and with `sync` "full" the system, too.

With "normal" a crash of the system may take what was committed in the last second or, under load, since the
last checkpoint; never what came before, and nothing from the middle.
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
from service.caches.records import Record, TokensAppended
from service.journal.base import JournalUnusable, OnCommitted
from service.journal.encoding import CorruptRecord, NewerFormat, encode
from service.journal.files import Files, Sync, read_meta, unusable
from service.journal.recovery import Apply, ApplyRun, Replay
from service.journal.writer import ROW_BYTES, Writer
from service.logging import get_logger

_log = get_logger(__name__)

# Dead bytes are not worth a round of compaction before they are so many.
COMPACTION_BYTES: Final = 8 << 20
_CLOSE_S: Final = 5.0
# Records after whose commits others run: a few milliseconds' worth of what follows them.
_TOLD_BYTES: Final = 1 << 12


class _Waiting(NamedTuple):
    size_bytes: int
    given_at: float
    loop: asyncio.AbstractEventLoop
    on_committed: OnCommitted


def open_journal(
    directory: Path, sync: Sync = "normal", compaction_bytes: int = COMPACTION_BYTES
) -> SqliteJournal:
    """The journal in a directory, which is made if it is not there. Raises JournalUnusable."""
    files = Files(directory, sync)
    try:
        with unusable(files.path):
            return SqliteJournal(files, files.connect(), compaction_bytes)
    except BaseException:
        files.close()
        raise


class SqliteJournal:
    """See `Journal`. Owner of its files, which nobody else can open until it is closed."""

    def __init__(self, files: Files, db: sqlite3.Connection, compaction_bytes: int) -> None:
        """Raises sqlite3.Error."""
        self._files = files
        self._db = db
        self._writer: Writer[_Waiting] = Writer(files, db, self._written)
        self._model = read_meta(db, "model")
        self._compaction_bytes = compaction_bytes
        self._waiting: collections.deque[_Waiting] = collections.deque()
        # Of each loop, whom to tell that its records are durable, or are not.
        self._to_tell: dict[asyncio.AbstractEventLoop, collections.deque[tuple[_Waiting, bool]]] = {}
        self._backlog_bytes = 0
        # The last mark there is, and the last up to which rows were to be dropped.
        self._marks = 0
        self._dropped = 0
        self._closed = False

    def recover(self, apply: Apply, apply_run: ApplyRun | None = None) -> None:
        """Applies all records, those of a cache and of its forks in their order. Before any commit.

        `apply_run` takes appends of one token each that follow one another in a cache as one record: see
        `Ledger.apply_run`. Without it, `apply` gets each. Raises JournalUnusable, maybe after some records.
        """
        replay = Replay(apply, apply_run or _one_by_one(apply))
        expected = self._writer.first_seq
        torn: CorruptRecord | None = None
        with unusable(self._files.path):
            query = "SELECT seq, wall_ns, data FROM log WHERE seq >= ? ORDER BY seq"
            with contextlib.closing(self._db.execute(query, (expected,))) as rows:
                for seq, wall_ns, row in rows:
                    if seq != expected:
                        raise self._damaged(expected, "it is missing")
                    torn = self._replay_row(replay, seq, wall_ns, row)
                    if torn is not None:
                        break
                    expected += 1
            try:
                replay.flush()
            except RecordConflict as error:
                raise self._unfitting(expected - 1, error) from None
            if torn is not None:
                self._cut(expected, torn)
        if expected != self._writer.next_seq:
            raise self._damaged(expected, "it is missing")

    def _replay_row(self, replay: Replay, seq: int, wall_ns: object, row: object) -> CorruptRecord | None:
        """What is wrong with it, if it is the last; otherwise raises JournalUnusable for that."""
        try:
            if not isinstance(wall_ns, int) or not isinstance(row, bytes):
                raise CorruptRecord(0, "not of the type that was written")
            replay.add(row, seq, wall_ns)
        except NewerFormat as error:
            raise JournalUnusable(
                f"{self._files.path}, row {seq}: {error}. Use the version of Quire that wrote it."
            ) from None
        except CorruptRecord as error:
            if seq + 1 == self._writer.next_seq:
                return error
            raise self._damaged(seq, str(error)) from None
        except RecordConflict as error:
            raise self._unfitting(seq, error) from None
        self._writer.size_bytes += ROW_BYTES + len(row)
        return None

    def _unfitting(self, seq: int, error: RecordConflict) -> JournalUnusable:
        return self._damaged(seq, f"records up to it do not fit: {error}")

    def _cut(self, seq: int, error: CorruptRecord) -> None:
        """Drops the last row, of which not all was written. Raises sqlite3.Error, OSError."""
        _log.warning(
            "the last row of the journal is damaged and was cut off",
            file=str(self._files.path),
            row=seq,
            error=str(error),
        )
        self._files.floor.write(seq - 1)
        self._db.execute("DELETE FROM log WHERE seq >= ?", (seq,))
        self._writer.next_seq = seq

    def _damaged(self, seq: int, what: str) -> JournalUnusable:
        return JournalUnusable(
            f"{self._files.path}, row {seq}: {what}. Restore the directory from a backup; or, to keep what "
            f"came before it, remove {self._files.floor.path} and the rows of table log with seq >= {seq}; "
            "or, to begin without caches, move the directory away."
        )

    @property
    def model_fingerprint(self) -> str | None:
        """Of the model whose caches these are; None before `bind_model`."""
        return self._model

    def bind_model(self, fingerprint: str) -> None:
        """From now on these are the caches of that model. Durable with the next records."""
        if fingerprint != self._model:
            self._model = self._writer.model = fingerprint

    @property
    def backlog_bytes(self) -> int:
        """Encoded records whose `on_committed` has not been called yet."""
        return self._backlog_bytes

    @property
    def oldest_waiting_s(self) -> float:
        """For how long the oldest of them have been waiting; 0 without any."""
        return time.monotonic() - self._waiting[0].given_at if self._waiting else 0.0

    @property
    def size_bytes(self) -> int:
        """Of all rows that were not dropped."""
        return self._writer.size_bytes

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
        loop = asyncio.get_running_loop()
        waiting = _Waiting(len(frames), time.monotonic(), loop, on_committed)
        self._waiting.append(waiting)
        self._backlog_bytes += len(frames)
        self._writer.give(frames, waiting)

    def wants_compaction(self, live_bytes: int) -> bool:
        """See `Journal.wants_compaction`."""
        writer = self._writer
        if writer.is_dropping or writer.dropped != self._dropped:
            return False
        # Who cannot share what the ledger shares keeps more than is live; a round has to pay all the same.
        return writer.size_bytes > max(2 * live_bytes, writer.kept_bytes) + self._compaction_bytes

    def begin_compaction(self) -> int:
        """See `Journal.begin_compaction`."""
        self._marks += 1
        self._writer.mark(self._marks)
        return self._marks

    def end_compaction(self, mark: int) -> None:
        """See `Journal.end_compaction`."""
        self._dropped = mark
        self._writer.drop(mark)

    def close(self) -> None:
        """See `Journal.close`. What waits is told afterwards, by the event loop."""
        if self._closed:
            return
        self._closed = True
        if self._writer.stop(_CLOSE_S):
            self._files.close()
        else:
            _log.error("the journal could not be written to its end in time", file=str(self._files.path))

    def _written(self, outcomes: Sequence[_Waiting], durable: bool) -> None:
        """On the writer's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Waiting]] = {}
        for waiting in outcomes:
            by_loop.setdefault(waiting.loop, []).append(waiting)
        for loop, those in by_loop.items():
            # A loop that has ended has nobody left to be told.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._tell_all, loop, those, durable)

    def _tell_all(self, loop: asyncio.AbstractEventLoop, those: Sequence[_Waiting], durable: bool) -> None:
        to_tell = self._to_tell.setdefault(loop, collections.deque())
        is_telling = bool(to_tell)
        to_tell.extend((waiting, durable) for waiting in those)
        if not is_telling:
            self._tell(loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tells some of those that wait to be told, in order. Others run before it tells the rest."""
        told_bytes = 0
        to_tell = self._to_tell[loop]
        while to_tell:
            if told_bytes >= _TOLD_BYTES:
                loop.call_soon(self._tell, loop)
                return
            waiting, durable = to_tell.popleft()
            told_bytes += waiting.size_bytes
            self._waiting.popleft()
            self._backlog_bytes -= waiting.size_bytes
            try:
                waiting.on_committed(durable)
            except Exception:
                # The others have to be told all the same.
                _log.exception("what follows a commit failed")


def _one_by_one(apply: Apply) -> ApplyRun:
    def apply_run(run: TokensAppended, wall_s: float) -> None:
        for index, token in enumerate(run.token_ids):
            apply(
                TokensAppended(run.number, run.position + index, (token,), run.prompt_len, run.ownership),
                wall_s,
            )

    return apply_run
