"""PagePool against a plain model of it; and its checks can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv.page_pool import DIGEST_BYTES, IntegrityError, OutOfPages, PagePool, page_digest, root_digest

PAGES = 5
CALLS = st.sampled_from(["allocate", "store", "store", "incref", "decref", "publish", "unpublish"])


def digest(n: int) -> bytes:
    return n.to_bytes(DIGEST_BYTES, "little")


class PlainPool:
    """The same in lists: free pages, the one freed last at the end; cached ones, the oldest first."""

    def __init__(self) -> None:
        self.free = list(range(PAGES - 1, -1, -1))
        self.cached: list[int] = []
        self.references = [0] * PAGES
        self.index: dict[int, bytes] = {}

    def allocate(self, count: int) -> list[int]:
        if count > len(self.free) + len(self.cached):
            raise OutOfPages(count, len(self.free) + len(self.cached))
        pages = [self.free.pop() if self.free else self.cached.pop(0) for _ in range(count)]
        for page in pages:
            self.references[page] = 1
            self.index.pop(page, None)
        return pages

    def incref(self, page: int, _: int) -> None:
        if page in self.free:
            raise IntegrityError
        if page in self.cached:
            self.cached.remove(page)
        self.references[page] += 1

    def decref(self, page: int, _: int) -> None:
        self._check_referenced(page)
        self.references[page] -= 1
        if not self.references[page]:
            (self.cached if page in self.index else self.free).append(page)

    def publish(self, page: int, number: int) -> bool:
        self._check_referenced(page)
        if page in self.index or digest(number) in self.index.values():
            return False
        self.index[page] = digest(number)
        return True

    def unpublish(self, page: int, _: int) -> None:
        self._check_referenced(page)
        self.index.pop(page, None)

    def store(self, _: int, number: int) -> int:
        (page,) = self.allocate(1)
        self.publish(page, number)
        self.decref(page, 0)
        return page

    def _check_referenced(self, page: int) -> None:
        if not self.references[page]:
            raise IntegrityError


@given(st.lists(st.tuples(CALLS, st.integers(0, PAGES - 1), st.integers(0, 3)), max_size=40))
def test_a_pool_is_its_plain_model(calls: list[tuple[str, int, int]]) -> None:
    """Also what it refuses, which changes nothing."""
    pool, plain = PagePool(PAGES), PlainPool()
    ours: dict[str, Callable[[int, int], object]] = {
        "allocate": lambda _, count: pool.allocate(count),
        "incref": lambda page, _: pool.incref(page),
        "decref": lambda page, _: pool.decref(page),
        "store": lambda _, number: store(number),
        "publish": lambda page, number: pool.publish(page, digest(number)),
        "unpublish": lambda page, _: pool.unpublish(page),
    }
    theirs = {name: getattr(plain, name) for name in ours} | {"allocate": lambda _, n: plain.allocate(n)}

    def store(number: int) -> int:
        """Cache a page."""
        (page,) = pool.allocate(1)
        pool.publish(page, digest(number))
        pool.decref(page)
        return page

    for name, page, number in calls:
        answers: list[object] = []
        for side in (ours, theirs):
            try:
                answers.append(side[name](page, number))
            except OutOfPages as error:
                answers.append((error.needed, error.available))
            except IntegrityError:
                answers.append("refused")
        assert answers[0] == answers[1], (name, page, number)
        pool.check_integrity()
        assert (pool.free, pool.cached) == (len(plain.free), len(plain.cached))
        assert pool.referenced == PAGES - pool.available
        assert [pool.refcount(one) for one in range(PAGES)] == plain.references
        assert {one: pool.digest_of(one) for one in range(PAGES)} == {
            one: plain.index.get(one) for one in range(PAGES)
        }
        by_digest = {value: one for one, value in plain.index.items()}
        assert [pool.lookup(digest(n)) for n in range(4)] == [by_digest.get(digest(n)) for n in range(4)]
    evicted, cached = pool.evicted_pages, pool.cached
    while pool.available:
        assert pool.allocate(1) == plain.allocate(1)
    assert pool.evicted_pages == evicted + cached


# Of four pages 0 is referenced, 1 is cached, and 2 and 3 are free.
CORRUPTIONS: dict[str, Callable[[PagePool], object]] = {
    "a page is leaked": lambda pool: pool._free.popitem(),
    "a page that does not exist is free": lambda pool: pool._free.update({4: None}),
    "a page in use is free": lambda pool: pool._free.update({0: None}),
    "a reference is lost": lambda pool: pool._refcounts.__setitem__(0, 0),
    "references are below zero": lambda pool: pool._refcounts.__setitem__(2, -1),
    "a cached page has no digest": lambda pool: pool._discard(1),
    "a free page has a digest": lambda pool: (
        pool._page_of.update({digest(9): 2}), pool._digest_of.update({2: digest(9)}),
    ),
    "a digest has a page that does not have it": lambda pool: pool._page_of.update({digest(9): 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_integrity_notices(name: str) -> None:
    pool = PagePool(4)
    assert pool.allocate(2) == [0, 1]
    pool.publish(1, digest(1))
    pool.decref(1)
    pool.check_integrity()
    CORRUPTIONS[name](pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def test_digests_depend_on_salt_order_and_everything_before() -> None:
    root, other = root_digest(b""), root_digest(b"tenant")
    chains = {
        root,
        other,
        page_digest(root, [1, 2]),
        page_digest(root, [2, 1]),
        page_digest(other, [1, 2]),
        page_digest(page_digest(root, [1, 2]), [1, 2]),
        page_digest(page_digest(root, [3, 4]), [1, 2]),
    }
    assert len(chains) == 7
    assert {len(one) for one in chains} == {DIGEST_BYTES}
    # In every process.
    assert page_digest(root_digest(b"a"), [1, 2**32 - 1]).hex() == "49f0662972c7e49e9b2057e165d038c1"
