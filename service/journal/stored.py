"""The common part of journals that store frames: unfinished commits, and compaction."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import Final

from service.caches.ledger import Ledger
from service.caches.records import Record
from service.journal.base import Journal, OnCommitted
from service.journal.compactor import Compactor
from service.journal.encoding import FRAME_BYTES, encode
from service.logging import get_logger

_log = get_logger(__name__)

# A compaction pass is worth its cost from this many obsolete bytes on.
COMPACTION_BYTES: Final = 8 << 20
# Commits that are written together become one frame until it is larger than this.
MAX_PAYLOAD_BYTES: Final = 8 << 20
# The interval of checks whether a pass pays off, and the pause between portions.
CHECK_S: Final = 1.0
PORTION_S: Final = 0.05
# Other tasks run after callbacks for this many bytes of records, which take a few milliseconds.
_CALLBACK_SLICE_BYTES: Final = 1 << 12


class StoredJournal(Journal):
    """Owner of the unfinished commits. A subclass stores the payloads in order.

    It sets `_size_bytes` to what it has recovered, runs `_compact_forever` in `run`, and sets `_closed` when
    it stores nothing more.
    """

    def __init__(self, compaction_bytes: int) -> None:
        self._compaction_bytes = compaction_bytes
        self._compactor: Compactor | None = None
        self._loop: asyncio.AbstractEventLoop
        # The sizes and callbacks of commits that are not reported; and the results of the first of these.
        self._waiting: collections.deque[tuple[int, OnCommitted]] = collections.deque()
        self._finished: collections.deque[bool] = collections.deque()
        # The size of all frames, of the ones before the mark of a pass, and of what the last pass left.
        self._size_bytes = self._obsolete_bytes = self._kept_bytes = 0
        # Whether a pass is complete, but the frames before its mark are not dropped yet.
        self._has_obsolete = False
        # Whether the last commit was durable.
        self._works = True
        self._closed = False

    # Methods of subclasses.

    def _store(self, payload: bytes, *, at_once: bool) -> bool | None:
        """Stores a payload. Returns whether it is durable. None: `_finish` is called later.

        at_once: all earlier commits have been reported, so this one may be stored synchronously.
        """
        raise NotImplementedError

    async def _prepare(self) -> bool:
        """Prepares for `_set_mark`. False: it failed."""
        return True

    def _set_mark(self) -> None:
        """Sets the mark: `_drop` drops everything stored before. No commit is unfinished."""
        raise NotImplementedError

    async def _drop(self) -> bool:
        """Drops everything stored before the mark. False: it failed, and may be tried again."""
        raise NotImplementedError

    # Commits.

    def bind_ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._compactor = Compactor(ledger, self._commit, self._begun, self._completed)

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        if self._compactor is not None and self._compactor.is_underway:
            self._compactor.commit(records, on_committed)
        else:
            self._commit(records, on_committed)

    def _commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        try:
            payload = encode(records)
        except ValueError:
            # A bug: a value is out of range.
            _log.exception("records could not be encoded")
            on_committed(False)
            return
        if self._closed:
            on_committed(False)
            return
        self._loop = asyncio.get_running_loop()
        size_bytes = FRAME_BYTES + len(payload)
        durable = self._store(payload, at_once=not self._waiting)
        if durable is None:
            self._waiting.append((size_bytes, on_committed))
        else:
            self._tell(size_bytes, on_committed, durable)

    def _finish(self, commits: int, durable: bool) -> None:
        """Reports the oldest `commits` unfinished commits: they are durable, or none of them is stored."""
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
            (size_bytes, on_committed), durable = self._waiting.popleft(), self._finished.popleft()
            done_bytes += size_bytes
            self._tell(size_bytes, on_committed, durable)

    def _tell(self, size_bytes: int, on_committed: OnCommitted, durable: bool) -> None:
        self._works = durable
        if durable:
            self._size_bytes += size_bytes
        try:
            on_committed(durable)
        except Exception:
            # A bug, which must not stop later callbacks.
            _log.exception("the callback of a commit failed")

    # Compaction.

    async def compact(self) -> float:
        """Runs the next step of a compaction, if one pays off. Returns the seconds until the next call."""
        compactor = self._compactor
        if compactor is None:
            return CHECK_S
        if compactor.is_underway:
            compactor.step()
        elif self._has_obsolete:
            if not await self._drop():
                return CHECK_S
            self._has_obsolete = False
            self._size_bytes -= self._obsolete_bytes
            self._kept_bytes = self._size_bytes
        elif not self._pays_off() or not await self._prepare():
            return CHECK_S
        else:
            compactor.start()
        return PORTION_S

    def _pays_off(self) -> bool:
        # Restated caches share fewer tokens than those in the ledger, so a pass may leave more than the
        # ledger's size.
        limit_bytes = max(2 * self._ledger.size_bytes, self._kept_bytes) + self._compaction_bytes
        return self._works and self._size_bytes > limit_bytes

    def _begun(self) -> None:
        self._set_mark()
        self._obsolete_bytes = self._size_bytes

    def _completed(self) -> None:
        self._has_obsolete = True

    async def _compact_forever(self) -> None:
        while True:
            pause_s = CHECK_S
            try:
                pause_s = await self.compact()
            except Exception:
                # A bug, which only costs disk space.
                _log.exception("the journal could not be compacted")
            await asyncio.sleep(pause_s)
