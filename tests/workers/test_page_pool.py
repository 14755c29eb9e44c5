"""PagePool and PrefixIndex: states of a page, eviction order, and that the checks can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from workers.kv.page_pool import IntegrityError, OutOfPages, PagePool
from workers.kv.prefix_index import DIGEST_BYTES, PrefixIndex, page_digest, root_digest


def digest(n: int) -> bytes:
    return n.to_bytes(DIGEST_BYTES, "little")


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.free, pool.cached, pool.referenced


def test_a_page_goes_from_free_to_referenced_to_cached_and_back() -> None:
    pool = PagePool(3)
    [page] = pool.allocate(1)
    assert counts(pool) == (2, 0, 1)
    assert pool.publish(page, digest(1))
    pool.decref(page)
    assert counts(pool) == (2, 1, 0)
    found = pool.lookup(digest(1))
    assert found == page
    pool.incref(page)
    assert counts(pool) == (2, 0, 1)
    pool.unpublish(page)
    assert pool.lookup(digest(1)) is None
    pool.decref(page)
    assert counts(pool) == (3, 0, 0)


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    pool.publish(held[0], digest(1))
    pool.decref(held[0])
    with pytest.raises(OutOfPages) as caught:
        pool.allocate(4)
    assert (caught.value.needed, caught.value.available) == (4, 3)
    assert counts(pool) == (2, 1, 1)
    assert pool.lookup(digest(1)) == held[0]
    assert sorted([*pool.allocate(3), held[1]]) == [0, 1, 2, 3]
    assert pool.evicted_pages == 1


def test_pages_are_evicted_least_recently_used_first_and_free_ones_before() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    for n, page in enumerate(pages):
        pool.publish(page, digest(n))
    for page in pages:
        pool.decref(page)
    pool.incref(pages[0])
    pool.decref(pages[0])
    assert pool.allocate(1) == [3]
    assert pool.evicted_pages == 0
    assert [pool.allocate(1)[0] for _ in range(3)] == [pages[1], pages[2], pages[0]]
    assert pool.evicted_pages == 3
    assert all(pool.lookup(digest(n)) is None for n in range(3))


def test_a_shared_page_stays_until_its_last_reference_goes() -> None:
    pool = PagePool(1)
    [page] = pool.allocate(1)
    pool.incref(page)
    pool.decref(page)
    assert pool.refcount(page) == 1
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.decref(page)
    assert pool.allocate(1) == [page]


def test_a_digest_keeps_its_first_page() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, digest(1))
    assert not pool.publish(second, digest(1))
    assert not pool.publish(first, digest(2))
    assert pool.lookup(digest(1)) == first
    assert not pool.is_indexed(second)
    pool.check_integrity()


def test_misuse_is_refused() -> None:
    pool = PagePool(2)
    with pytest.raises(IntegrityError):
        pool.incref(0)
    with pytest.raises(IntegrityError):
        pool.decref(0)
    with pytest.raises(IntegrityError):
        pool.publish(0, digest(1))
    with pytest.raises(IntegrityError):
        pool.unpublish(0)
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0)
    assert counts(pool) == (2, 0, 0)


def leak_a_page(pool: PagePool) -> None:
    pool._free.popitem()


def free_a_page_that_does_not_exist(pool: PagePool) -> None:
    pool._free[4] = None


def free_a_page_in_use(pool: PagePool) -> None:
    pool._free[0] = None


def lose_a_reference(pool: PagePool) -> None:
    pool._refcounts[0] -= 1


def count_below_zero(pool: PagePool) -> None:
    pool._refcounts[next(iter(pool._free))] = -1


def forget_a_cached_digest(pool: PagePool) -> None:
    pool._index.discard(1)


def index_a_free_page(pool: PagePool) -> None:
    pool._index.insert(next(iter(pool._free)), digest(9))


def index_one_way(pool: PagePool) -> None:
    pool._index._page_of[digest(9)] = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        leak_a_page,
        free_a_page_that_does_not_exist,
        free_a_page_in_use,
        lose_a_reference,
        count_below_zero,
        forget_a_cached_digest,
        index_a_free_page,
        index_one_way,
    ],
)
def test_check_integrity_notices(corrupt: Callable[[PagePool], None]) -> None:
    pool = PagePool(4)
    assert pool.allocate(2) == [0, 1]
    pool.publish(1, digest(1))
    pool.decref(1)
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


def test_digests_depend_on_salt_order_and_everything_before() -> None:
    root = root_digest(b"")
    chains = {
        root,
        root_digest(b"tenant"),
        page_digest(root, [1, 2]),
        page_digest(root, [2, 1]),
        page_digest(root_digest(b"tenant"), [1, 2]),
        page_digest(page_digest(root, [1, 2]), [1, 2]),
        page_digest(page_digest(root, [3, 4]), [1, 2]),
    }
    assert len(chains) == 7
    assert {len(d) for d in chains} == {DIGEST_BYTES}


def test_a_digest_is_the_same_in_every_process() -> None:
    assert page_digest(root_digest(b"a"), [1, 2**32 - 1]).hex() == "49f0662972c7e49e9b2057e165d038c1"


def test_the_index_maps_both_ways() -> None:
    index = PrefixIndex()
    assert index.insert(3, digest(1))
    assert index.page_of(digest(1)) == 3
    assert index.digest_of(3) == digest(1)
    assert 3 in index
    assert index.discard(3)
    assert not index.discard(3)
    assert len(index) == 0
    assert index.page_of(digest(1)) is None
