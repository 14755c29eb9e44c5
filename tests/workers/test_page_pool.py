"""PagePool against a plain model of it; and its checks can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from workers.kv.page_pool import DIGEST_BYTES, IntegrityError, PagePool, page_digest, root_digest


def digest(n: int) -> bytes:
    return n.to_bytes(DIGEST_BYTES, "little")


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


def check(pool: PagePool) -> None:
    for page in range(pool.num_pages):
        pool.check_page(page)
    pool.check_totals()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_checks_notice(name: str) -> None:
    pool = PagePool(4)
    assert pool.allocate(2) == [0, 1]
    pool.publish(1, digest(1))
    pool.decref(1)
    check(pool)
    CORRUPTIONS[name](pool)
    with pytest.raises(IntegrityError):
        check(pool)


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
