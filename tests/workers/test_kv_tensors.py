"""The memory of the KV cache."""

from __future__ import annotations

import pytest
import torch

from workers.kv.tensors import KvTensors

torch.set_num_threads(1)


def new_kv(num_pages: int = 40, dtype: torch.dtype = torch.float32) -> KvTensors:
    kv = KvTensors(num_layers=3, num_pages=num_pages, page_size=16, kv_heads=2, head_dim=8, dtype=dtype)
    for index in range(3):
        for pages in kv.layer(index):
            pages.copy_(torch.randn(pages.shape))
    return kv


def test_layers_are_apart_and_contiguous() -> None:
    kv = new_kv()
    seen = set()
    for index in range(3):
        for pages in kv.layer(index):
            assert pages.shape == (40, 16, 2, 8) and pages.is_contiguous()
            seen.add(pages.data_ptr())
    assert len(seen) == 6
    assert kv.layer(1)[0].data_ptr() == kv.layer(1)[0].data_ptr()


@pytest.mark.parametrize("count", [1, 16, 17, 19])
def test_copy_copies_all_layers_and_nothing_else(count: int) -> None:
    kv = new_kv()
    before = [[pages.clone() for pages in kv.layer(index)] for index in range(3)]
    pairs = [(3 if i % 2 else i, 39 - i) for i in range(count)]  # one source occurs often
    kv.copy_pages(pairs)
    for index in range(3):
        for pages, old in zip(kv.layer(index), before[index], strict=True):
            expected = old.clone()
            for source, destination in pairs:
                expected[destination] = old[source]
            assert torch.equal(pages, expected)


def test_copy_refuses_what_depends_on_order() -> None:
    kv = new_kv()
    kv.copy_pages([])
    for pairs in ([(1, 2), (3, 2)], [(1, 2), (2, 3)], [(4, 4)]):
        with pytest.raises(ValueError, match="a destination must occur once, and not as a source"):
            kv.copy_pages(pairs)
    for pairs in ([(0, 40)], [(-1, 3)]):
        with pytest.raises(ValueError, match=r"page must be in 0\.\.39"):
            kv.copy_pages(pairs)


def test_bytes_of_a_page() -> None:
    kv = new_kv(dtype=torch.bfloat16)
    shape = {"num_layers": 3, "page_size": 16, "kv_heads": 2, "head_dim": 8}
    assert kv.bytes_per_page == 3 * 2 * 16 * 2 * 8 * 2 == KvTensors.page_bytes(dtype=torch.bfloat16, **shape)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="num_pages: must be at least 1, got 0"):
        KvTensors(num_layers=1, num_pages=0, page_size=16, kv_heads=1, head_dim=8, dtype=torch.float32)
