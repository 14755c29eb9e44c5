"""KV on disk: forwards that wait until their pages are read, and pages that are written in the background.

KV is only reused through the prefix cache. When a forward arrives, those of its pages that are on disk but
not in the prefix cache are read into pages of the pool and added to it. Then the forward is queued like any
other, and finds them (`Engine.begin`). What could not be read is computed.

In turn, every full page of the pool is written to disk in the background. In a model with recurrent layers a
prefix can only be reused up to a snapshot of their states. So pages are read and written up to a snapshot,
and the snapshot with them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.v1.types_pb2 import KvDiskUsage

from workers.kv.disk_pages import DiskPages, ReadOutcome
from workers.kv.disk_threads import (
    MOST_WRITES,
    DiskReport,
    DiskThreads,
    Listed,
    PageRead,
    PageReads,
    WritesFailed,
    WritesGoOn,
    Written,
)
from workers.kv.page_files import PageFiles
from workers.kv.page_pool import DIGEST_BYTES, OutOfPages, is_state, state_digest
from workers.kv.states import StateSlots
from workers.kv.table import KvTable
from workers.operations import Forward

_log = logging.getLogger(__name__)

# If no page was read for this long, forwards stop waiting for the disk, and nothing is read any more.
PATIENCE_S = 10.0
# What is written at most, on average: others use the disk, too.
_WRITE_BYTES_PER_S = 256e6


@dataclass(slots=True, eq=False)
class _Waiting:
    """A forward that waits for pages.

    Attributes:
        pages: The pages of its prefix, which are held for it.
        unread: The digests of those that are still being read.
    """

    forward: Forward
    pages: list[int] = field(default_factory=list)
    unread: set[bytes] = field(default_factory=set)


class KvDisk:
    """Owns the waiting forwards and the pages that are held for them. The thread of the step loop calls it.

    Any thread may call `usage`.
    """

    def __init__(
        self,
        table: KvTable,
        views: Callable[[bytes, int], list[memoryview]],
        files: PageFiles,
        *,
        max_bytes: int,
        write_bytes_per_s: float = _WRITE_BYTES_PER_S,
    ) -> None:
        """Store the pages of `table` from now on. `views`: see `KvTensors.stored_views`."""
        self._table, self._views, self._files = table, views, files
        self._max_bytes, self._write_bytes_per_s = max_bytes, write_bytes_per_s
        self._pages = DiskPages()
        self._pages.listed(*files.list_changes())
        self._threads: DiskThreads | None = None
        self._writes = 0
        self._waiting: deque[_Waiting] = deque()
        # When a page was last read, or the first of several reads was started. See PATIENCE_S.
        self._progress_s = 0.0
        self._reads_pages = True
        # Whether the last write failed, and whether writing has ended for good.
        self._has_failed = self._is_stopped = False
        table.store_on(self._pages)

    def report_to(self, report: Callable[[DiskReport], None]) -> None:
        """Start the threads. They call `report` with what is to be passed to `take`."""
        self._threads = DiskThreads(
            self._files, self._views, report, write_bytes_per_s=self._write_bytes_per_s
        )

    def __len__(self) -> int:
        """The number of forwards that wait."""
        return len(self._waiting)

    # Forwards.

    def admit(self, forward: Forward) -> bool:
        """Whether a forward can be queued now. If not, it waits for its pages, or behind one that does."""
        waiting = _Waiting(forward)
        if self.has(forward.sequence):
            self._waiting.append(waiting)
            return False
        reusable = len(forward.token_ids) - max(forward.wanted_rows, 1)
        if reusable < self._table.page_size or not self._reads_pages or self._threads is None:
            return True
        absent = self._hold_prefix(waiting, reusable)
        try:
            self._read(waiting, absent)
        except OutOfPages:
            # It cannot begin either. The gateway sends it again when others have made room.
            waiting.unread.clear()
        if not waiting.unread:
            self._table.held.release(waiting.pages)
            return True
        self._waiting.append(waiting)
        return False

    def has(self, sequence: int) -> bool:
        """Whether a forward of this sequence waits."""
        return any(waiting.forward.sequence == sequence for waiting in self._waiting)

    def _hold_prefix(self, waiting: _Waiting, reusable: int) -> list[tuple[bytes, bytes]]:
        """Hold the pages of a forward's prefix that are in memory, or are being read for others.

        Returns (digest, parent) of the pages that are only on disk, up to the first one that is nowhere. With
        recurrent layers, up to the last available state; if that has to be read, it comes last.
        """
        table, pages, forward = self._table, self._pages, waiting.forward
        where = table.get(forward.sequence), forward.position, forward.salt
        prefix: Iterable[tuple[bytes, bytes]] = table.prefixes.digests_at(*where, forward.token_ids, reusable)
        if table.states is not None:
            prefix = self._up_to_state(prefix, table.states)
        absent: list[tuple[bytes, bytes]] = []
        for digest, parent in prefix:
            if (page := table.find(digest)) is not None:
                table.held.hold(page)
                waiting.pages.append(page)
            elif (page := pages.being_read(digest)) is not None:
                waiting.unread.add(digest)
                if not is_state(digest):
                    table.held.hold(page)
                    waiting.pages.append(page)
            elif pages.has(digest):
                absent.append((digest, parent))
            else:
                break
        if forward.position % table.page_size == 0:
            end = forward.position + reusable
            full = max(0, end - end % table.reuse_unit - forward.position) // table.page_size
            states = sum(is_state(digest) for digest, _ in absent)
            pages.counts.wanted_pages += full - len(waiting.pages) + states
        return absent

    def _up_to_state(
        self, prefix: Iterable[tuple[bytes, bytes]], states: StateSlots
    ) -> list[tuple[bytes, bytes]]:
        """The pages of a prefix up to the last available state, and that state if it has to be read."""
        table, pages = self._table, self._pages
        found: list[tuple[bytes, bytes]] = []
        usable, to_read = 0, list[tuple[bytes, bytes]]()
        for digest, parent in prefix:
            if table.find(digest) is None and pages.being_read(digest) is None and not pages.has(digest):
                break
            found.append((digest, parent))
            state = state_digest(digest)
            if table.find(state) is not None:
                usable, to_read = len(found), []
            elif pages.being_read(state) is not None or (pages.has(state) and states.may_read):
                usable, to_read = len(found), [(state, parent)]
        return found[:usable] + to_read

    def _read(self, waiting: _Waiting, absent: Sequence[tuple[bytes, bytes]]) -> None:
        """Start to read pages for a forward. Raises OutOfPages, and then has no effect."""
        if not absent:
            return
        table = self._table
        fresh = iter(table.held.allocate(sum([not is_state(digest) for digest, _ in absent])))
        if not self._pages.are_read:
            self._progress_s = time.monotonic()
        reads = []
        for digest, parent in absent:
            if is_state(digest):
                assert table.states is not None
                number = table.states.begin_read()
            else:
                number = next(fresh)
                # Held by the read and by the forward, which may be dropped before the read has ended.
                table.held.hold(number)
                waiting.pages.append(number)
            self._pages.begin_read(digest, number)
            reads.append(PageRead(digest, parent, number))
        waiting.unread.update(digest for digest, _ in absent)
        assert self._threads is not None
        self._threads.read(reads)

    def take(self, report: DiskReport) -> list[Forward]:
        """Take the report of a thread. Returns the forwards that can be queued now, in order of arrival."""
        match report:
            case PageReads(outcomes):
                self._progress_s = time.monotonic()
                for digest, outcome in outcomes:
                    self._end_read(digest, outcome)
            case Written(write, is_stored):
                self._writes -= 1
                self._pages.written(write, is_stored=is_stored)
                if is_stored and self._has_failed:
                    self._has_failed = False
                    _log.info("KV is stored on disk again")
            case WritesFailed(why):
                self._pages.stop_writes()
                if not self._has_failed:
                    _log.error("KV is not stored on disk: %s", why)
                self._has_failed = True
            case WritesGoOn():
                self._pages.takes_writes = not self._is_stopped
            case Listed(found, gone):
                self._pages.listed(found, gone)
        self.write_more()
        return self._release(lambda waiting: not waiting.unread)

    def _end_read(self, digest: bytes, outcome: ReadOutcome) -> None:
        number, is_good = self._pages.end_read(digest, outcome), outcome is ReadOutcome.READ
        if outcome is ReadOutcome.REFUSED and self._pages.counts.refused_pages == 1:
            _log.warning("a file of KV is not what its name says: such files are deleted, and counted")
        if is_state(digest):
            assert self._table.states is not None
            self._table.states.end_read(number, digest[:DIGEST_BYTES] if is_good else None)
        else:
            if is_good:
                self._table.filled(number, digest)
            self._table.held.release([number])
        for waiting in self._waiting:
            waiting.unread.discard(digest)

    def _release(self, is_ready: Callable[[_Waiting], bool]) -> list[Forward]:
        """Remove the ready forwards, and release their pages. Forwards of a sequence stay in order."""
        ready: list[Forward] = []
        still: deque[_Waiting] = deque()
        blocked: set[int] = set()
        for waiting in self._waiting:
            if waiting.forward.sequence not in blocked and is_ready(waiting):
                self._table.held.release(waiting.pages)
                ready.append(waiting.forward)
            else:
                blocked.add(waiting.forward.sequence)
                still.append(waiting)
        self._waiting = still
        return ready

    def write_more(self) -> None:
        """Hand the writing thread as many pages as it takes now."""
        while self._threads is not None and self._writes < MOST_WRITES:
            write = self._pages.next_write()
            if write is None:
                return
            self._writes += 1
            self._threads.write(write)

    def give_up_if_stuck(self) -> list[Forward]:
        """If the disk does not answer: return all waiting forwards, to be computed, and read nothing more."""
        if not self._waiting or time.monotonic() - self._progress_s < PATIENCE_S:
            return []
        _log.error("KV is not read from disk any more: it did not answer for %d s", PATIENCE_S)
        self._reads_pages = False
        return self._release(lambda _: True)

    # Dropped forwards. What is being read for them still goes to the prefix cache.

    def drop(self, unwanted: Callable[[Forward], bool]) -> list[Forward]:
        """Drop and return waiting forwards, which get no answer."""
        removed = [waiting for waiting in self._waiting if unwanted(waiting.forward)]
        for waiting in removed:
            self._table.held.release(waiting.pages)
            self._waiting.remove(waiting)
        return [waiting.forward for waiting in removed]

    def stop(self) -> None:
        """Read and store nothing from now on, since the files are of other weights."""
        self._reads_pages, self._is_stopped = False, True
        self._pages.stop_writes()
        _log.warning("KV is not stored on disk until this worker starts again: it has other weights")

    def usage(self) -> KvDiskUsage:
        """The counts since the start, and what is on disk."""
        usage = KvDiskUsage()
        usage.CopyFrom(self._pages.counts)
        usage.bytes, usage.max_bytes = self._files.size_bytes, self._max_bytes
        usage.stopped = self._has_failed or not self._pages.takes_writes
        usage.unwritten_pages = self._pages.unwritten
        return usage
