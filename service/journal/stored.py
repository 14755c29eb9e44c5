"""What journals have in common that store rows: waiting commits, and which rows are obsolete."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from service.caches.records import Record
from service.journal.base import Journal, OnCommitted
from service.journal.encoding import encode
from service.logging import get_logger

_log = get_logger(__name__)

# Fewer obsolete bytes are not worth a compaction pass.
COMPACTION_BYTES: Final = 8 << 20
# A row is closed when it is larger than this.
MAX_ROW_BYTES: Final = 8 << 20
# After callbacks for so many bytes of records, which take a few milliseconds, other tasks run.
_CALLBACK_SLICE_BYTES: Final = 1 << 12
# Called by a writer with a number of commits, the oldest that were not reported yet. True: they are durable.
# False: none of them is stored.
OnWritten = Callable[[int, bool], None]


class RowWriter(Protocol):
    """Makes rows of commits, in order, and stores them.

    Attributes:
        next_seq: Number of the next row.
        written_bytes: Size of all rows that were written or recovered, including dropped ones.
        model: A new model tag, which is stored with the next row.
        is_dropping: There may be rows that are not needed.
    """

    next_seq: int
    written_bytes: int
    model: str | None
    is_dropping: bool

    def write(self, frames: bytes, *, at_once: bool) -> bool:
        """Writes the frames of a commit. True: it is durable. False: the result is reported later.

        at_once: all earlier commits have been reported, so it may be written before this returns.
        """

    def drop(self, first_seq: int) -> None:
        """Drops the rows before `first_seq`. To be called only when earlier rows are dropped."""


class _PendingCommit(NamedTuple):
    size_bytes: int
    given_at: float
    on_committed: OnCommitted


class StoredJournal(Journal):
    """Owner of the commits that wait. A subclass owns what the writer writes to."""

    is_durable = True

    def __init__(self, writer: RowWriter, compaction_bytes: int) -> None:
        self._writer = writer
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
        given_at = time.monotonic()
        if self._writer.write(frames, at_once=not self._waiting):
            self._tell(given_at, on_committed, durable=True)
        else:
            self._waiting.append(_PendingCommit(len(frames), given_at, on_committed))

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
            self._tell(commit.given_at, commit.on_committed, durable=durable)

    def _tell(self, given_at: float, on_committed: OnCommitted, *, durable: bool) -> None:
        for on_latency in self.on_latency if durable else ():
            on_latency(time.monotonic() - given_at)
        try:
            on_committed(durable)
        except Exception:
            # A bug of ours, which must not stop what follows.
            _log.exception("the callback of a commit failed")
