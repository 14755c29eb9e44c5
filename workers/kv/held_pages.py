"""Pages of the pool that are held for no sequence: those that are read from disk, and what waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from workers.kv.integrity import IntegrityCheck
from workers.kv.page_pool import PagePool


class HeldPages:
    """Owner of these references."""

    def __init__(self, pool: PagePool, checks: Sequence[IntegrityCheck]) -> None:
        """`checks`: those that run now, which are told of each reference."""
        self._pool, self._checks = pool, checks
        # How many references each page has here.
        self._references: Counter[int] = Counter()

    def __iter__(self) -> Iterator[int]:
        """The pages, once for each reference."""
        return self._references.elements()

    def hold(self, page: int) -> None:
        """Keep a page that is in the pool's index, or held already, in the pool until `let_go`."""
        self._pool.incref(page)
        self._note([page])

    def take(self, count: int) -> list[int]:
        """Pages for contents that come from elsewhere, each held once. Raises OutOfPages."""
        pages = self._pool.allocate(count)
        self._note(pages)
        return pages

    def _note(self, pages: Sequence[int]) -> None:
        self._references.update(pages)
        for check in self._checks:
            check.held(pages)

    def let_go(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page. Without others it is cached or free. The last first.

        So the end of a chain is evicted before the pages it depends on.
        """
        for page in reversed(pages):
            self._pool.decref(page)
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
        for check in self._checks:
            check.let_go(pages)
