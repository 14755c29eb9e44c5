"""Writing keys and values to the slots of packed pages."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import dense
from workers.models.page_writes import PageWrites

PAGES, PAGE_SIZE, HEADS, WIDTH = 5, 16, 2, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_pages(dtype: torch.dtype) -> None:
    """Each element at the place of its token, head and number, and nothing else; as rows and as pages."""
    need_compiled()
    k_data, v_data = (torch.full((PAGES, PAGE_SIZE, HEADS, width), torch.nan).to(dtype) for width in (32, 48))
    k_pages, v_pages = PackedKeys(k_data), PackedValues(v_data)
    slots = torch.tensor([79, 0, 15, -1, 16, 33, 14])
    key, value = torch.randn(7, HEADS, 32).to(dtype), torch.randn(7, HEADS, 48).to(dtype)
    PageWrites(slots).write(key, value, k_pages, v_pages)
    written = slots >= 0
    for pages, new in ((k_pages, key), (v_pages, value)):
        assert torch.equal(pages.rows(slots[written]), new[written])
        plain = dense(pages).flatten(0, 1)
        assert torch.equal(plain[slots[written]], new[written])
        assert int(plain.isnan().all(-1).all(-1).sum()) == PAGES * PAGE_SIZE - int(written.sum())
    before = k_data.clone()
    with pytest.raises(IndexError, match="slots: a slot is beyond the last page"):
        kv_write(key, key, k_pages, PackedValues(k_data.clone()), torch.tensor([0, 1, 2, 3, 4, 5, 80]))
    wide = key.to(torch.float32 if dtype is torch.bfloat16 else torch.bfloat16)
    for wrong in (key[:, :1], key[..., :16], key[:3]):
        with pytest.raises(ValueError, match="keys: shape must be"):
            PageWrites(slots).write(wrong, value, k_pages, v_pages)
    with pytest.raises(ValueError, match="values: shape must be"):
        PageWrites(slots).write(key, key, k_pages, v_pages)
    with pytest.raises(TypeError, match="keys: dtype must be"):
        PageWrites(slots).write(wide, value, k_pages, v_pages)
    assert torch.equal(k_data.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 16, 1, 8), torch.float32),
        ((2, 8, 1, 16), torch.float32),
        ((2, 16, 1, 272), torch.bfloat16),
        ((2, 16, 1, 16), torch.float16),
    ],
)
def test_pages_without_kernels_cannot_be_packed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for kind in (PackedKeys, PackedValues):
        with pytest.raises(ValueError, match="data: there are no kernels for"):
            kind(torch.zeros(shape, dtype=dtype))
