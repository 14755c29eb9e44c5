"""Which pages are on disk, are to be written there, or are being read. No I/O, no threads, no clock.

A page that is full gets a digest (`page_pool`), under which it is stored. A digest is at most one of

    queued      its page is in the pool, and is to be written when the disk has time
    writing     its page was handed to the thread that writes, and is still in the pool
    on disk     as far as this process knows: another one may have deleted the file

and beside that it may be *read* into a page that nothing else refers to yet.

**The pool never waits for the disk.** A page that is evicted while it is queued is not written. One that is
evicted while it is being written makes that write stale, before its memory gets other contents: what was
copied by then is good, and a file that was not is not given its name (see `PageWrite.is_stale`).

A snapshot of a recurrent state goes the same way, by its own digest: "page" below stands for both, and its
*number* is that of the page or of the state's slot.

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
        parent: The digest of the page before the page, or the root's.
        number: Of the page, or of the state's slot.
        is_stale: Its memory may have other contents by now, or will have at once. The step loop's thread sets
            it before it writes to the page; the writing thread reads it after its last read of the page.
    """

    digest: bytes
    parent: bytes
    number: int
    is_stale: bool = False


class ReadOutcome(Enum):
    """How the read of a page has ended.

    READ: it has the bits that were written. MISSING: there is no file, or it cannot be read. REFUSED: the
    file is not what its name says, and was deleted.
    """

    READ = auto()
    MISSING = auto()
    REFUSED = auto()


class DiskPages:
    """The states of pages. The thread of the step loop owns it; all operations are O(1) per page."""

    def __init__(self) -> None:
        # Those since the start.
        self.counts = KvDiskUsage()
        # False: nothing is stored. What is on disk is still read.
        self.takes_writes = True
        self._on_disk: set[bytes] = set()
        # In the order in which they were filled: their parents and numbers.
        self._queued: dict[bytes, tuple[bytes, int]] = {}
        self._writing: dict[bytes, PageWrite] = {}
        self._reading: dict[bytes, int] = {}

    # What the pool does.

    def published(self, number: int, digest: bytes, parent: bytes) -> None:
        """A page of the pool is full, and can be found by this digest. It follows the page of `parent`."""
        if self.takes_writes and digest not in self._on_disk and digest not in self._writing:
            self._queued[digest] = parent, number

    def discarded(self, digest: bytes) -> None:
        """The page of this digest is about to get other contents."""
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
        """The page to write next, which is being written from now on. None: there is none."""
        if not self._queued:
            return None
        digest = next(iter(self._queued))
        write = self._writing[digest] = PageWrite(digest, *self._queued.pop(digest))
        return write

    def written(self, write: PageWrite, *, is_stored: bool) -> None:
        """A write has ended. Not stored: it was stale, or the disk had no room for it."""
        if self._writing.get(write.digest) is write:
            del self._writing[write.digest]
        if not is_stored:
            self.counts.dropped_pages += 1
            return
        self.counts.written_pages += 1
        self._found(write.digest)

    def _found(self, digest: bytes) -> None:
        """There is a file. If a page is being written to it, it is on disk when that has ended."""
        if digest not in self._writing:
            self._on_disk.add(digest)
            self._queued.pop(digest, None)

    def stop_writes(self) -> None:
        """Store nothing until `takes_writes` is set again. Writes that are under way end as they can."""
        self.takes_writes = False
        self._queued.clear()

    # Reads.

    def has(self, digest: bytes) -> bool:
        """Whether a page is thought to be on disk."""
        return digest in self._on_disk

    def will_have(self, digest: bytes) -> bool:
        """Whether a page is on disk, or is to be."""
        return digest in self._on_disk or digest in self._queued or digest in self._writing

    @property
    def are_read(self) -> bool:
        """Whether any page is being read."""
        return bool(self._reading)

    def being_read(self, digest: bytes) -> int | None:
        """The number of the page into which the page of this digest is being read, if it is."""
        return self._reading.get(digest)

    def begin_read(self, digest: bytes, number: int) -> None:
        """A page on disk is being read into a page of the pool that nothing else refers to."""
        self._reading[digest] = number

    def end_read(self, digest: bytes, outcome: ReadOutcome) -> int:
        """A read has ended. Returns the number of the page that has its contents, if these are good."""
        match outcome:
            case ReadOutcome.READ:
                self.counts.read_pages += 1
            case ReadOutcome.REFUSED:
                self.counts.refused_pages += 1
                self._on_disk.discard(digest)
            case ReadOutcome.MISSING:
                self._on_disk.discard(digest)
        return self._reading.pop(digest)

    # What other processes do.

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
