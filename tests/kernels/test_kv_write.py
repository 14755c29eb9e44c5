"""Writing keys and values to the slots of packed pages."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import dense, packed
from workers.models.page_writes import PageWrites

PAGES, PAGE_SIZE, HEADS, WIDTH = 5, 16, 2, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_pages(dtype: torch.dtype) -> None:
    """Each element at the place of its token, head and number, and nothing else."""
    need_compiled()
    k_data, v_data = (torch.full((PAGES, PAGE_SIZE, HEADS, width), torch.nan).to(dtype) for width in (32, 48))
    k_pages, v_pages = PackedKeys(k_data), PackedValues(v_data)
    slots = torch.tensor([79, 0, 15, -1, 16, 33, 14])
    key, value = torch.randn(7, HEADS, 32).to(dtype), torch.randn(7, HEADS, 48).to(dtype)
    PageWrites(slots).write(key, value, k_pages, v_pages)
    written = slots >= 0
    for pages, new in ((k_pages, key), (v_pages, value)):
        plain = dense(pages).flatten(0, 1)
        assert torch.equal(plain[slots[written]], new[written])
        assert int(plain.isnan().all(-1).all(-1).sum()) == PAGES * PAGE_SIZE - int(written.sum())
    before = k_data.clone()
    with pytest.raises(IndexError, match="slots: a slot is beyond the last page"):
        kv_write(key, key, k_pages, PackedValues(k_data.clone()), torch.tensor([0, 1, 2, 3, 4, 5, 80]))
    assert torch.equal(k_data.nan_to_num(), before.nan_to_num())


def test_rows_of_float32_in_pages_of_bfloat16() -> None:
    """They are rounded."""
    need_compiled()
    rows, slots = torch.randn(PAGES * PAGE_SIZE, HEADS, 32), torch.randperm(PAGES * PAGE_SIZE)
    plain = torch.zeros(PAGES, PAGE_SIZE, HEADS, 32).bfloat16()
    wide, narrow = packed(plain, plain), packed(plain, plain)
    PageWrites(slots).write(rows, rows, *wide)
    PageWrites(slots).write(rows.bfloat16(), rows.bfloat16(), *narrow)
    for found, expected in zip(wide, narrow, strict=True):
        assert torch.equal(found.data, expected.data)
    with pytest.raises(TypeError, match="values: must have the dtype of keys"):
        PageWrites(slots).write(rows, rows.bfloat16(), *wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_8_bits(dtype: torch.dtype) -> None:
    """Each element is the nearest of 255; what is too small is 0, and what is not finite NaN."""
    need_compiled()
    rows = torch.randn(PAGES * PAGE_SIZE, HEADS, 48) * 10.0 ** torch.randint(
        -25, 25, (PAGES * PAGE_SIZE, HEADS, 1)
    )
    rows[3], rows[4] = 0, 1e-32
    rows[5, 1, 17], rows[6, 0, 2] = torch.inf, torch.nan
    rows = rows.to(dtype)
    by_page = rows.view(PAGES, PAGE_SIZE, HEADS, 48)
    found = packed(by_page, by_page, quantised=True)
    for pages in found:
        plain = dense(pages).flatten(0, 1).double()
        exact = rows.double()
        largest = exact.abs().amax(-1, keepdim=True)
        # Half a step, and what rounding the result to the dtype costs.
        allowed = largest / 127 * (0.5 + 1e-4) + largest * torch.finfo(dtype).eps
        is_finite = largest.isfinite().squeeze(-1)
        assert int((~is_finite).sum()) == 2
        off = (plain - exact).abs() - torch.where(largest < 1e-30, largest, allowed)
        assert (off[is_finite] <= 0).all()
        assert plain[~is_finite].isnan().all()
        assert not plain[3:5].any()
        moved = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 79])
        before = dense(pages).flatten(0, 1)
        pages.move(*moved)
        before[moved[1]] = before[moved[0]]
        assert torch.equal(dense(pages).flatten(0, 1).nan_to_num(), before.nan_to_num())
