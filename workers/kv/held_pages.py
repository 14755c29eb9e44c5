"""Pages of the pool that are held for no sequence: those that are read from disk, and what waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workers.kv.page_pool import PagePool


class HeldPages:
    """Owner of these references: how many each page has here."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.references: Counter[int] = Counter()

    def hold(self, page: int) -> None:
        """Keep a page that is in the pool's index, or held already, in the pool until `let_go`."""
        self._pool.incref(page)
        self.references[page] += 1

    def take(self, count: int) -> list[int]:
        """Pages for contents that come from elsewhere, each held once. Raises OutOfPages."""
        pages = self._pool.allocate(count)
        self.references.update(pages)
        return pages

    def let_go(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page. Without others it is cached or free. The last first.

        So the end of a chain is evicted before the pages it depends on.
        """
        for page in reversed(pages):
            self._pool.decref(page)
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
