"""Writing keys and values to slots."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import kv_write

torch.set_num_threads(1)

PAGES, PAGE_SIZE, HEADS, WIDTH = 5, 16, 2, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_writes_the_named_slots_and_nothing_else(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    k_pages = torch.randn(PAGES, PAGE_SIZE, HEADS, WIDTH).to(dtype)
    v_pages = torch.randn(PAGES, PAGE_SIZE, HEADS, WIDTH).to(dtype)
    before = k_pages.clone(), v_pages.clone()
    # First and last slot, neighbours across a page boundary, and one that is not to be written.
    slots = [79, 0, 15, -1, 16, 33]
    packed = torch.randn(6, 3 * HEADS, WIDTH).to(dtype)
    key, value = packed[:, :HEADS], packed[:, HEADS : 2 * HEADS]  # strided, as in the decoder
    kv_write(key, value, k_pages, v_pages, torch.tensor(slots, dtype=index_dtype))
    for pages, old, new in ((k_pages, before[0], key), (v_pages, before[1], value)):
        expected = old.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = new[row]
        assert torch.equal(pages, expected)


def test_no_tokens() -> None:
    pages = torch.zeros(PAGES, PAGE_SIZE, HEADS, WIDTH)
    empty = torch.zeros(0, HEADS, WIDTH)
    kv_write(empty, empty, pages, pages.clone(), torch.zeros(0, dtype=torch.int64))
    assert not pages.any()


def test_wrong_arguments_are_named() -> None:
    pages = torch.zeros(PAGES, PAGE_SIZE, HEADS, WIDTH)
    key, slots = torch.zeros(3, HEADS, WIDTH), torch.arange(3)
    with pytest.raises(ValueError, match="value: shape"):
        kv_write(key, key[:2], pages, pages, slots)
    with pytest.raises(ValueError, match="slots: shape"):
        kv_write(key, key, pages, pages, slots[:2])
    with pytest.raises(TypeError, match="slots: dtype"):
        kv_write(key, key, pages, pages, slots.float())
    with pytest.raises(TypeError, match="v_pages: must have the dtype"):
        kv_write(key, key, pages, pages.bfloat16(), slots)
    with pytest.raises(ValueError, match="k_pages: must be contiguous"):
        kv_write(key, key, pages[:, ::2], pages[:, ::2].contiguous(), slots)
    with pytest.raises(ValueError, match="k_pages: shape"):
        kv_write(key, key, pages[..., :4].contiguous(), pages, slots)
