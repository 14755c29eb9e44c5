"""Tracks which pages are on disk, will be written there, or are being read. No I/O, no threads, no clock.

A full page has a digest (`page_pool`), under which it is stored. A digest is in at most one of the states

    queued      its page is in the pool, and will be written when the disk has time
    writing     its page was handed to the thread that writes, and is still in the pool
    on disk     as far as this process knows: another process may have deleted the file

Besides, its page may be being *read* into a page of the pool that nothing else refers to yet.

**The pool never waits for the disk.** A page that is evicted while it is queued is not written. If it is
evicted while it is being written, the write becomes stale before the page is overwritten. A stale write whose
page was not copied completely gives the file no name (see `PageWrite.is_stale`).

A snapshot of a recurrent state is handled in the same way, by its own digest: "page" below means both, and
its *number* is that of the page or of the state's slot.

The files are in `page_files`, the threads in `disk_threads`, and the pages of the pool in `table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from quire.v1.types_pb2 import KvDiskUsage

from workers.kv.page_pool import IntegrityError, is_state


@dataclass(slots=True, eq=False)
class PageWrite:
    """A page that is being written.

    Attributes:
        parent: The digest of the page before it, or the root digest.
        number: Of the page, or of the state's slot.
        is_stale: The page may be overwritten from now on. The step loop's thread sets it before it writes to
            the page; the writing thread checks it after its last read of the page.
    """

    digest: bytes
    parent: bytes
    number: int
    is_stale: bool = False


class ReadOutcome(Enum):
    """How the read of a page has ended.

    READ: the page has the bits that were written. MISSING: there is no file, or it cannot be read. REFUSED:
    the file's contents do not match its name, and it was deleted.
    """

    READ = auto()
    MISSING = auto()
    REFUSED = auto()


class DiskPages:
    """The states of pages. The thread of the step loop owns it; all operations are O(1) per page."""

    def __init__(self) -> None:
        # Counts since the start.
        self.counts = KvDiskUsage()
        # False: nothing is stored. Pages on disk are still read.
        self.takes_writes = True
        self._on_disk: set[bytes] = set()
        # (parent, number) by digest, in the order in which the pages were filled.
        self._queued: dict[bytes, tuple[bytes, int]] = {}
        self._writing: dict[bytes, PageWrite] = {}
        self._reading: dict[bytes, int] = {}

    # Called when the pool changes.

    def published(self, number: int, digest: bytes, parent: bytes) -> None:
        """A page of the pool was indexed by this digest. It follows the page of `parent`."""
        if self.takes_writes and digest not in self._on_disk and digest not in self._writing:
            self._queued[digest] = parent, number

    def discarded(self, digest: bytes) -> None:
        """The page of this digest is about to be overwritten."""
        if self._queued.pop(digest, None) is not None:
            self.counts.dropped_pages += 1
        elif (write := self._writing.pop(digest, None)) is not None:
            write.is_stale = True

    # Writes.

    @property
    def unwritten(self) -> int:
        """How many pages are queued or being written."""
        return len(self._queued) + len(self._writing)

    def next_write(self) -> PageWrite | None:
        """Moves the next queued page to the state writing, and returns it. None: there is none."""
        if not self._queued:
            return None
        digest = next(iter(self._queued))
        write = self._writing[digest] = PageWrite(digest, *self._queued.pop(digest))
        return write

    def written(self, write: PageWrite, *, is_stored: bool) -> None:
        """A write has ended. Without `is_stored` it was stale, or the disk had no room."""
        if self._writing.get(write.digest) is write:
            del self._writing[write.digest]
        if not is_stored:
            self.counts.dropped_pages += 1
            return
        self.counts.written_pages += 1
        self._found(write.digest)

    def _found(self, digest: bytes) -> None:
        """There is a file of this page. While this process writes it, it does not count as on disk."""
        if digest not in self._writing:
            self._on_disk.add(digest)
            self._queued.pop(digest, None)

    def stop_writes(self) -> None:
        """Store nothing until `takes_writes` is set again. Running writes go on."""
        self.takes_writes = False
        self._queued.clear()

    # Reads.

    def has(self, digest: bytes) -> bool:
        """Whether a page is on disk, as far as is known."""
        return digest in self._on_disk

    def will_have(self, digest: bytes) -> bool:
        """Whether a page is on disk, or will be."""
        return digest in self._on_disk or digest in self._queued or digest in self._writing

    @property
    def are_read(self) -> bool:
        """Whether any page is being read."""
        return bool(self._reading)

    def being_read(self, digest: bytes) -> int | None:
        """The number of the page into which this digest's page is being read. None: it is not."""
        return self._reading.get(digest)

    def begin_read(self, digest: bytes, number: int) -> None:
        """Note that a page on disk is being read into a page of the pool that nothing else refers to."""
        self._reading[digest] = number

    def end_read(self, digest: bytes, outcome: ReadOutcome) -> int:
        """A read has ended. Returns the number of the page that was read into."""
        match outcome:
            case ReadOutcome.READ:
                self.counts.read_pages += 1
            case ReadOutcome.REFUSED:
                self.counts.refused_pages += 1
                self._on_disk.discard(digest)
            case ReadOutcome.MISSING:
                self._on_disk.discard(digest)
        return self._reading.pop(digest)

    # Files of other processes.

    def listed(self, found: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """Files of other workers were found, or files have been deleted."""
        self._on_disk.difference_update(gone)
        for digest in found:
            self._found(digest)

    def check_integrity(self, lookup: Callable[[bytes], int | None]) -> None:
        """Raise IntegrityError for a contradiction. `lookup`: `KvTable.find`."""
        queued = ((digest, number) for digest, (_, number) in self._queued.items())
        for digest, number in (*queued, *((write.digest, write.number) for write in self._writing.values())):
            if lookup(digest) != number:
                raise IntegrityError(f"page {number} is to be stored, and has other contents")
        states = (self._queued.keys(), self._writing.keys(), self._on_disk)
        if len(set().union(*states)) != sum(map(len, states)):
            raise IntegrityError("a page is in several of the states queued, writing, on disk")
        if any(write.is_stale for write in self._writing.values()):
            raise IntegrityError("a stale write is still expected")
        targets = {(is_state(digest), number) for digest, number in self._reading.items()}
        if len(targets) != len(self._reading):
            raise IntegrityError("two pages are read into one")
