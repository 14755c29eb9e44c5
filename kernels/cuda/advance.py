"""Computes the inputs of the next decode step from those of the last one, on the device.

The next token of each sequence is the one that was chosen for it, and its position is the next one. A host
that continues with the chosen tokens sends nothing.

Dimension letters: N items; P pages in the longest page table; S tokens a page.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import Variant

BLOCK = 128


@triton.jit(do_not_specialize=["items", "table_stride", "table_pages"])
def advance_kernel(
    token_ids,  # [N]
    positions,  # [N]
    slots,  # [N]
    context_lens,  # [N]
    chosen,  # [N]
    page_tables,  # [N, P]
    items,
    table_stride,
    table_pages,  # P
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK items."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = item < items
    length = tl.load(context_lens + item, mask=inside, other=0)
    live = inside & (length > 0)  # padding items do not change
    position = tl.load(positions + item, mask=live, other=0) + 1
    column = position // PAGE_SIZE
    has_page = live & (column < table_pages)
    # If the table has no page for the position yet, the slot is -1. Such a step must not run before the host
    # has sent the longer table and the slots.
    page = tl.load(page_tables + item.to(tl.int64) * table_stride + column, mask=has_page, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(token_ids + item, tl.load(chosen + item, mask=live, other=0), mask=live)
    tl.store(positions + item, position, mask=live)
    tl.store(slots + item, tl.where(has_page, slot, -1), mask=live)
    tl.store(context_lens + item, length + 1, mask=live)


@cache
def _variant(page_size: int) -> Variant:
    return Variant(advance_kernel, {"PAGE_SIZE": page_size, "BLOCK": BLOCK}, num_warps=4, num_stages=1)


def advance(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    chosen: torch.Tensor,
    page_tables: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Launch `advance_kernel`. Checks nothing; launches what follows from the shapes alone.

    Mutates the first four.

    Args:
        token_ids: [N] int64, the token of each item.
        positions: [N] int64, its index in its sequence.
        slots: [N] int64, where its keys and values are written.
        context_lens: [N] int32, the length of the sequence with it; 0: a padded item, which is left alone.
        chosen: [N] int64, the token that follows.
        page_tables: [N, P] int32, the pages of each sequence.
        page_size: S.
    """
    items, table_pages = page_tables.shape
    if items == 0:
        return
    _variant(page_size).launch(
        (triton.cdiv(items, BLOCK),),
        token_ids,
        positions,
        slots,
        context_lens,
        chosen,
        page_tables,
        items,
        page_tables.stride(0),
        table_pages,
    )
