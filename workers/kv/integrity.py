"""Whether the pages, the sequences that hold them and the index of their tokens agree, page by page.

A pool of thousands of sequences takes seconds to go through, which nobody should have to wait for. So a check
is a walk in slices, and the table may change between two of them: it tells the walk which pages sequences get
and lose, and those of sequences that were counted already are counted on. So what was counted is always what
the sequences hold now, and a walk raises no false alarm, however much has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from workers.kv.page_pool import IntegrityError, PagePool

if TYPE_CHECKING:
    from workers.kv.table import KvSequence

# Pages looked at in a slice: about a millisecond.
SLICE_PAGES = 2048


class IntegrityWalk:
    """One check of a table. Reads what the table owns; the table tells it what changes, from its start on."""

    def __init__(self, sequences: Mapping[int, KvSequence], pool: PagePool, page_size: int) -> None:
        self._sequences = sequences
        self._pool = pool
        self._page_size = page_size
        self._pending = list(sequences)
        self._counted: set[int] = set()
        self._holders: Counter[int] = Counter()

    def born(self, key: int) -> None:
        """Note a sequence that is new, and has no pages yet."""
        self._counted.add(key)

    def gained(self, key: int, pages: Iterable[int]) -> None:
        """Note that a sequence has got pages."""
        if key in self._counted:
            self._holders.update(pages)

    def lost(self, key: int, pages: Iterable[int]) -> None:
        """Note that a sequence has given pages back."""
        if key in self._counted:
            self._holders.subtract(pages)

    def slices(self) -> Iterator[None]:
        """Go through everything, a slice at a time. Raises IntegrityError for a contradiction."""
        looked_at = 0
        for key in self._pending:
            seq = self._sequences.get(key)
            if seq is None or key in self._counted:
                continue
            self._check_sequence(key, seq)
            self._counted.add(key)
            self._holders.update(seq.pages)
            looked_at += 1 + len(seq.pages)
            if looked_at >= SLICE_PAGES:
                looked_at = 0
                yield
        for page in range(self._pool.num_pages):
            self._pool.check_page(page)
            if self._holders[page] != self._pool.refcount(page):
                raise IntegrityError(
                    f"page {page} has {self._pool.refcount(page)} references,"
                    f" {self._holders[page]} sequences hold it"
                )
            if page % SLICE_PAGES == SLICE_PAGES - 1:
                yield
        self._pool.check_totals()

    def _check_sequence(self, key: int, seq: KvSequence) -> None:
        full_pages, offset = divmod(len(seq), self._page_size)
        pages = -(-seq.reserved_len_tokens // self._page_size)
        for holds, what in (
            (seq.key == key, f"it calls itself {seq.key}"),
            (len(set(seq.pages)) == len(seq.pages), "it holds a page twice"),
            (len(seq.digests) == full_pages, f"{len(seq.digests)} digests, {full_pages} full pages"),
            (seq.reserved_len_tokens >= len(seq), "more tokens committed than reserved"),
            (len(seq.pages) == pages, f"{len(seq.pages)} pages for {seq.reserved_len_tokens} tokens"),
        ):
            if not holds:
                raise IntegrityError(f"sequence {key}: {what}")
        for page, digest in zip(seq.pages, seq.digests, strict=False):
            if self._pool.digest_of(page) not in (None, digest):
                raise IntegrityError(f"sequence {key}: page {page} is indexed as holding other tokens")
        written_to = full_pages if offset == 0 or seq.reserved_len_tokens > len(seq) else full_pages + 1
        for page in seq.pages[written_to:]:
            if self._pool.is_indexed(page):
                raise IntegrityError(f"sequence {key}: page {page} is open for writing but indexed")
