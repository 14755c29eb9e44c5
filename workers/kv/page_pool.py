"""Accounting of the KV pool's pages: reference counts, a free list, and the prefix index.

A page is in one of three states:

    free        no references, and no reusable content
    cached      no references, but it is full and indexed, so its tokens can be found again
    referenced  one or more sequences refer to it (indexed or not)

A full page is indexed by its digest: a hash chain over its own tokens and, through the digest of the page
before it, all tokens before them and the salt. Keys and values of a token depend on exactly these, so pages
with equal digests are interchangeable. If a page in the middle of a chain is evicted, the pages after it are
not found until it is computed again; they are still correct then. A recurrent state (`states`) after the last
token of a page depends on the same tokens, and its digest is made from the page's.

Pages are numbers. Their memory is in `tensors`, and the sequences are in `table`.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16

# Separates root digests from page digests, for any salt.
_ROOT_PERSON = b"quire-kv-root"


def root_digest(salt: bytes) -> bytes:
    """Return the parent digest of a sequence's first page. Sequences share pages only under equal salts."""
    return blake2b(salt, digest_size=DIGEST_BYTES, person=_ROOT_PERSON).digest()


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a full page that holds `tokens` and follows the page of digest `parent`.

    Raises struct.error for a token outside uint32.
    """
    return blake2b(parent + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=DIGEST_BYTES).digest()


def state_digest(page: bytes) -> bytes:
    """Return the digest of the recurrent state after the page of this digest. It is one byte longer."""
    return page + b"S"


def is_state(digest: bytes) -> bool:
    """Whether a digest is of a state, not of a page."""
    return len(digest) > DIGEST_BYTES


class OutOfPages(Exception):
    """There are too few pages, even after evicting all cached ones. Nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV pages needed, {available} available")
        self.needed = needed
        self.available = available


class IntegrityError(Exception):
    """The accounting is inconsistent: a bug in Quire. The pool must not be used any more."""


class PagePool:
    """Pages 0 to num_pages - 1. Every operation is O(1) per page.

    **free + cached + referenced == num_pages**, at any moment between two calls.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self.evicted_pages = 0
        # Called with each digest whose page is about to be overwritten.
        self.on_discard: Callable[[bytes], None] | None = None
        # One-to-one: each digest has one canonical page.
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._refcounts = [0] * num_pages
        # A stack (the last freed page is likely in a CPU cache), as a dict for lookups. Low pages first.
        self._free = dict.fromkeys(range(num_pages - 1, -1, -1))
        # Least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Pages without reusable content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Unreferenced pages kept for reuse."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can return: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def referenced(self) -> int:
        """Pages in use."""
        return self.num_pages - self.available

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def is_private(self, page: int) -> bool:
        """Whether `page` may be written to: it has one reference, and is not indexed."""
        return self._refcounts[page] == 1 and page not in self._digest_of

    def digest_of(self, page: int) -> bytes | None:
        """Return the digest that `page` is indexed by, if any."""
        return self._digest_of.get(page)

    def lookup(self, digest: bytes) -> int | None:
        """Return the page indexed by `digest`. Take a reference before any `allocate`, which may evict it."""
        return self._page_of.get(digest)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one reference each. Evicts cached pages if there are too few free ones.

        The caller owns the references. Raises OutOfPages, and changes nothing, if there are too few.
        """
        if count > self.available:
            raise OutOfPages(count, self.available)
        pages = []
        for _ in range(count):
            page = self._free.popitem()[0] if self._free else self._evict()
            self._refcounts[page] = 1
            pages.append(page)
        return pages

    def incref(self, page: int, count: int = 1) -> None:
        """Add references to a page that is referenced or cached. Raises IntegrityError on a free one."""
        if self._refcounts[page] == 0:
            if page not in self._cached:
                raise IntegrityError(f"page {page} is free and cannot be shared")
            del self._cached[page]
        self._refcounts[page] += count

    def decref(self, page: int) -> None:
        """Drop a reference. Without any, an indexed page becomes cached, and any other page free."""
        if self._refcounts[page] == 0:
            raise IntegrityError(f"page {page} is released more often than it was referenced")
        self._refcounts[page] -= 1
        if self._refcounts[page] > 0:
            return
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free[page] = None

    def publish(self, page: int, digest: bytes) -> bool:
        """Index the full, referenced `page` by `digest`. False if either is indexed already."""
        if self._refcounts[page] == 0:
            raise IntegrityError(f"page {page} is not referenced and cannot be indexed")
        if page in self._digest_of or digest in self._page_of:
            return False
        self._page_of[digest], self._digest_of[page] = page, digest
        return True

    def unpublish(self, page: int) -> None:
        """Remove the referenced `page` from the index, because it is about to be overwritten."""
        if self._refcounts[page] == 0:
            raise IntegrityError(f"page {page} is not referenced and cannot be overwritten")
        if page in self._digest_of:
            self._discard(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._discard(page)
        self.evicted_pages += 1
        return page

    def _discard(self, page: int) -> None:
        """Remove an indexed page from the index."""
        digest = self._digest_of.pop(page)
        del self._page_of[digest]
        if self.on_discard is not None:
            self.on_discard(digest)

    def check_totals(self) -> None:
        """Raise IntegrityError unless free + cached + referenced pages are all pages."""
        unreferenced = self._refcounts.count(0)
        if self.available != unreferenced:
            raise IntegrityError(
                f"{self.free} free + {self.cached} cached pages are not the {unreferenced} without references"
            )

    def check_page(self, page: int) -> None:
        """Raise IntegrityError unless `page` is in exactly one state and the index agrees. O(1)."""
        count, is_free, is_cached = self._refcounts[page], page in self._free, page in self._cached
        if count < 0:
            raise IntegrityError(f"page {page} has {count} references")
        states = (count > 0) + is_free + is_cached
        if states != 1:
            raise IntegrityError(f"page {page} is in {states} of the states free, cached, referenced")
        digest = self._digest_of.get(page)
        if is_free and digest is not None:
            raise IntegrityError(f"page {page} is free but indexed")
        if is_cached and digest is None:
            raise IntegrityError(f"page {page} is cached but not indexed")
        is_one_to_one = len(self._page_of) == len(self._digest_of)
        if not is_one_to_one or (digest is not None and self._page_of.get(digest) != page):
            raise IntegrityError("digests and pages are not one to one")


class HeldPages:
    """Owner of references to pages that are read from disk, or are held for forwards that wait for these.

    `references`: their number, by page.
    """

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
