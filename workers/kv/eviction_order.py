"""Which of the pages that are stored gives way next. No I/O, no clock.

A page is of use only with all pages before it. So one gives way that no other page continues, an *end*: of
all ends the least recently used. A text is lost from its end, and what several texts begin with stays until
they are gone. A recurrent state is an end when the page is one after which it is: it has the key of that page
with one more byte.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from workers.kv.page_pool import state_digest

# Entries of the heap that are out of date are removed when there are so many for each page.
_MOST_ENTRIES = 2


@dataclass(slots=True, eq=False)
class StoredPage:
    """A page, or a recurrent state after it.

    Attributes:
        parent: The key of the page before the page, which need not be here.
        used_ns: When it was used last, as far as that is known.
    """

    key: bytes
    parent: bytes
    size_bytes: int
    used_ns: int

    @property
    def page_key(self) -> bytes:
        """The key of the page, or of that after which the state is."""
        return self.key[: len(self.parent)]


class EvictionOrder:
    """The pages, their sizes and times. Operations take O(log n) time on average."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._pages: dict[bytes, StoredPage] = {}
        # By key, how many pages continue it, also of one that is not here (yet).
        self._continued: Counter[bytes] = Counter()
        # (used_ns, key) of each end, and entries that have become wrong since.
        self._ends: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def add(self, key: bytes, parent: bytes, size_bytes: int, used_ns: int) -> None:
        """Add a page that was used last at this time. No effect if it is here."""
        if key in self._pages:
            return
        self._pages[key] = StoredPage(key, parent, size_bytes, used_ns)
        self._continued[parent] += 1
        self.size_bytes += size_bytes
        self._note_end(key)

    def use(self, key: bytes, used_ns: int) -> None:
        """Note that a page was used later than was known."""
        self._pages[key].used_ns = used_ns
        self._note_end(key)

    def remove(self, key: bytes) -> None:
        """Remove a page. No effect if it is not here."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        self.size_bytes -= page.size_bytes
        self._continued[page.parent] -= 1
        if not self._continued[page.parent]:
            del self._continued[page.parent]
            self._note_end(page.parent)
            self._note_end(state_digest(page.parent))

    def next(self) -> StoredPage | None:
        """The page that gives way next. None: there are no pages."""
        while self._ends:
            used_ns, key = self._ends[0]
            if self._is_end(key) and self._pages[key].used_ns == used_ns:
                return self._pages[key]
            heappop(self._ends)
        # Keys and parents are only what names of files say: they may go round in a circle.
        return next(iter(self._pages.values()), None)

    def _is_end(self, key: bytes) -> bool:
        page = self._pages.get(key)
        return page is not None and page.page_key not in self._continued

    def _note_end(self, key: bytes) -> None:
        if not self._is_end(key):
            return
        heappush(self._ends, (self._pages[key].used_ns, key))
        if len(self._ends) > _MOST_ENTRIES * len(self._pages) + 8:
            self._ends = [(page.used_ns, key) for key, page in self._pages.items() if self._is_end(key)]
            heapify(self._ends)
