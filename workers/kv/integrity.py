"""Checks page by page that the pool, the sequences that hold its pages, and the prefix index agree.

Checking a pool of thousands of sequences takes seconds. So a check runs in slices, and the table may change
between them. The table reports each page that a sequence gets or frees, and the check updates its counts if
it has counted the sequence already. So its counts always match what these sequences hold, and there are no
false alarms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from workers.kv.page_pool import IntegrityError, PagePool

if TYPE_CHECKING:
    from workers.kv.sequence import KvSequence

# Pages checked in a slice: about a millisecond.
PAGES_PER_SLICE = 2048


class IntegrityCheck:
    """One check of a table. Reads the table's data. The table reports all changes since the start."""

    def __init__(
        self, sequences: Mapping[int, KvSequence], pool: PagePool, page_size: int, held: Mapping[int, int]
    ) -> None:
        """Take a table's data. `held`: how many references a page has for no sequence."""
        self._sequences = sequences
        self._pool = pool
        self._page_size, self._held = page_size, held
        self._pending = list(sequences)
        self._counted: set[int] = set()
        self._holders: Counter[int] = Counter()

    def sequence_added(self, key: int) -> None:
        """Note a new sequence, which has no pages yet."""
        self._counted.add(key)

    def pages_added(self, key: int, pages: Iterable[int]) -> None:
        if key in self._counted:
            self._holders.update(pages)

    def pages_removed(self, key: int, pages: Iterable[int]) -> None:
        if key in self._counted:
            self._holders.subtract(pages)

    def slices(self) -> Iterator[None]:
        """Check everything, a slice at a time. Raises IntegrityError for a contradiction."""
        checked_pages = 0
        for key in self._pending:
            seq = self._sequences.get(key)
            if seq is None or key in self._counted:
                continue
            self._check_sequence(key, seq)
            self._counted.add(key)
            self._holders.update(seq.pages)
            checked_pages += 1 + len(seq.pages)
            if checked_pages >= PAGES_PER_SLICE:
                checked_pages = 0
                yield
        for page in range(self._pool.num_pages):
            self._pool.check_page(page)
            holders, references = self._holders[page] + self._held.get(page, 0), self._pool.refcount(page)
            if holders != references:
                raise IntegrityError(f"page {page} has {references} references, {holders} holders")
            if page % PAGES_PER_SLICE == PAGES_PER_SLICE - 1:
                yield
        self._pool.check_totals()

    def _check_sequence(self, key: int, seq: KvSequence) -> None:
        full_pages, offset = divmod(len(seq), self._page_size)
        pages, writable = -(-len(seq) // self._page_size), seq.writable
        for holds, what in (
            (seq.key == key, f"its key is {seq.key}"),
            (len(set(seq.pages)) == len(seq.pages), "it holds a page twice"),
            (len(seq.digests) == full_pages, f"{len(seq.digests)} digests, {full_pages} full pages"),
            (full_pages * self._page_size <= seq.listed <= len(seq), f"{seq.listed} tokens of {len(seq)}"),
            (len(seq.pages) >= pages, f"{len(seq.pages)} pages for {len(seq)} tokens"),
            (len(seq.pages) * self._page_size >= writable, f"{len(seq.pages)} pages for {writable} slots"),
        ):
            if not holds:
                raise IntegrityError(f"sequence {key}: {what}")
        for page, digest in zip(seq.pages, seq.digests, strict=False):
            if self._pool.digest_of(page) not in (None, digest):
                raise IntegrityError(f"sequence {key}: page {page} is indexed as holding other tokens")
        first_writable = full_pages if offset == 0 or writable > len(seq) else full_pages + 1
        for page in seq.pages[first_writable:]:
            if not self._pool.is_private(page):
                raise IntegrityError(f"sequence {key}: page {page} may be written but is shared or indexed")
