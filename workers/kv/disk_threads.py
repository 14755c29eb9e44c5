"""The threads that read and write the files of pages.

They know no states and no pool. The step loop's thread hands them pages, and they report what has become of
these by `report`, which has to be quick and safe on any thread.

The thread that writes keeps to a bandwidth and gives way to all others: it has a low priority, and what it
has not written in time is only computed again. It also looks about once a second which files other processes
have written or deleted. After a failed write it writes nothing for a minute: the disk is full, or read-only.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.kv.disk_pages import PageWrite, ReadOutcome
from workers.kv.page_files import PageFiles

# Pages that are being written or wait for it in this thread. The others wait where they cost nothing.
MOST_WRITES = 4
# Half of the time of a read from the page cache goes into checksums, so that two are nearly twice as fast.
_READERS = 2
# A read of many pages is done in such portions, in turns with others.
_PORTION_PAGES = 16
_LIST_S = 1.0
# The share of the time that listing very many files may take.
_LISTING_SHARE = 0.05
# After a failed write.
_RETRY_S = 60.0
# The niceness of the writing thread: steps should not notice it.
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class PageRead:
    """A page on disk, or a state, that is read.

    Attributes:
        parent: The digest of the page before the page.
        number: Of the page of the pool, or of the slot, into which it is read.
    """

    digest: bytes
    parent: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Written:
    """A write has ended. `is_stored`: see `DiskPages.written`."""

    write: PageWrite
    is_stored: bool


@dataclass(frozen=True, slots=True)
class WritesFailed:
    """The disk takes no writes. `why` is for the log."""

    why: str


@dataclass(frozen=True, slots=True)
class WritesGoOn:
    """The disk may accept writes again."""


@dataclass(frozen=True, slots=True)
class PageReads:
    """Pages were read, or not."""

    outcomes: Sequence[tuple[bytes, ReadOutcome]]


@dataclass(frozen=True, slots=True)
class Listed:
    """Which files have come and gone."""

    found: set[bytes]
    gone: set[bytes]


# What a thread has done, for `KvDisk.take`.
DiskReport = Written | WritesFailed | WritesGoOn | PageReads | Listed


class DiskThreads:
    """Owns the threads, which end with the process."""

    def __init__(
        self,
        files: PageFiles,
        views: Callable[[bytes, int], list[memoryview]],
        report: Callable[[DiskReport], None],
        *,
        write_bytes_per_s: float,
    ) -> None:
        """Start them.

        Args:
            files: What they read and write.
            views: The memory of a page of the pool, or of a state's slot, by digest and number.
            report: Takes what has been done.
            write_bytes_per_s: What is written at most, on average.
        """
        self._files, self._views, self._report = files, views, report
        self._bytes_per_s = write_bytes_per_s
        self._writes: queue.Queue[PageWrite] = queue.Queue(MOST_WRITES)
        self._reads: queue.SimpleQueue[Sequence[PageRead]] = queue.SimpleQueue()
        for run in (self._write_pages, *[self._read_pages] * _READERS):
            threading.Thread(target=run, name="kv-disk", daemon=True).start()

    def write(self, write: PageWrite) -> None:
        """Store a page. At most MOST_WRITES are under way at a time."""
        self._writes.put_nowait(write)

    def read(self, reads: Sequence[PageRead]) -> None:
        self._reads.put(reads)

    def _write_pages(self) -> None:
        if sys.platform == "linux":
            # For this thread only.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        retry_s: float | None = None
        next_s = list_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if retry_s is not None and now_s >= retry_s:
                retry_s = None
                self._report(WritesGoOn())
            if now_s >= list_s:
                self._list_changes()
                done_s = time.monotonic()
                list_s = done_s + max(_LIST_S, (done_s - now_s) / _LISTING_SHARE)
            try:
                write = self._writes.get(timeout=max(0.0, list_s - time.monotonic()))
            except queue.Empty:
                continue
            time.sleep(max(0.0, next_s - time.monotonic()))
            is_stored = False
            if retry_s is None and not write.is_stale:
                views = self._views(write.digest, write.number)
                next_s = max(next_s, time.monotonic()) + sum(map(len, views)) / self._bytes_per_s
                try:
                    is_stored = self._files.write(write, views)
                except OSError as error:
                    retry_s = time.monotonic() + _RETRY_S
                    self._report(WritesFailed(error.strerror or repr(error)))
            self._report(Written(write, is_stored))

    def _list_changes(self) -> None:
        try:
            found, gone = self._files.list_changes()
        except OSError:
            # Then nothing new is known. What cannot be read is missing, in time.
            return
        if found or gone:
            self._report(Listed(found, gone))

    def _read_pages(self) -> None:
        while True:
            reads = self._reads.get()
            portion, rest = reads[:_PORTION_PAGES], reads[_PORTION_PAGES:]
            if rest:
                self._reads.put(rest)
            outcomes = [
                (
                    read.digest,
                    self._files.read(read.digest, read.parent, self._views(read.digest, read.number)),
                )
                for read in portion
            ]
            self._report(PageReads(outcomes))
