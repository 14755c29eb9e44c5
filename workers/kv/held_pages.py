"""References to pages that no sequence has: of pages that are read from disk, and of forwards that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workers.kv.page_pool import PagePool


class HeldPages:
    """Owner of these references. `references`: their number, by page."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.references: Counter[int] = Counter()

    def hold(self, page: int) -> None:
        """Keep a page, which is indexed or already held, in the pool until `release`."""
        self._pool.incref(page)
        self.references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate pages for contents from disk, each held once. Raises OutOfPages."""
        pages = self._pool.allocate(count)
        self.references.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. Without any it becomes cached or free.

        Last page first, so that the end of a chain is evicted before the pages it depends on.
        """
        for page in reversed(pages):
            self._pool.decref(page)
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
