"""Paged attention of one token per item, the keys of long items split over several programs.

A program reads some of the keys of one key-value head, for the G query heads that share it, padded to the 16
rows of a matrix instruction. Which ones, a work list says (kernels/cuda/decode_plan.py). Of an item of
several parts, each program writes the weighted average of its values and the base-2 logarithm of the sum of
its weights. The one that comes last combines them, in the order of the parts, so the result of an item
depends only on the item and the number of its parts.

Launches begin early (`kernels.cuda.dependent_launch`).

Compiled for sm_90 with Triton 3.7.1, bfloat16, G = 4, several splits; nothing spills:

    width     keys a tile   warps   stages   registers   shared memory   buffers each of K and V
    64        64            4       4        64          52 KiB          3
    80, 96    64            4       3        112         70 KiB          2
    128       64            4       3        96          70 KiB          2
    256       32            4       3        126         73 KiB          2

Three programs run on a multiprocessor at once. With a width of 256, tiles of 64 keys need 212 registers and
138 KiB. No matrix instruction has the precision of float32: with a width of 128, tiles of 32 keys spill, and
tiles of 16 do not.

The optional parameters of kernels/attention_scoring.py need up to 2 more registers. Keys of 192 and values of
128 need 72 registers and 57 KiB, with the tiles of a width of 256. Keys of 576 whose first 512 elements are
values need 242 registers and 91 KiB, for 2 buffers of 32 keys.

Dimension letters: N items; H query heads; K key-value heads; G = H / K; D width of a key, E the power of two
not below it; V and F the same of a value; P pages in the longest page table; S tokens a page; U units of
the work list; M rows (G and padding).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.attention_scoring import Scoring
from kernels.cuda.attention_tiles import LOWEST, TileConfig, attend_keys, load_query, log2_scales, with_sinks
from kernels.cuda.decode_parts import arrives_last, combine_parts, part_of
from kernels.cuda.decode_plan import DecodePlan
from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant
from kernels.packed_pages import LeadingValues

# Elements of the results of parts that a program combines at once: 16 of each of its threads.
COMBINED = 2048


def config_for(dtype: torch.dtype, width: int, *, in_keys: bool = False) -> TileConfig:
    """The configuration for a dtype and head width, the wider of keys and values.

    `in_keys`: values are the first elements of their keys.
    """
    if dtype is torch.float32:
        return TileConfig(block_m=16, tile=16, num_warps=4, num_stages=2 if in_keys else 3)
    if in_keys:
        return TileConfig(block_m=16, tile=32, num_warps=4, num_stages=3)
    if width <= 64:
        return TileConfig(block_m=16, tile=64, num_warps=4, num_stages=4)
    return TileConfig(block_m=16, tile=64 if width <= 128 else 32, num_warps=4, num_stages=3)


# Slices of a batch begin at any address, and table widths change: neither may compile another variant.
@triton.jit(
    do_not_specialize=["table_stride", "items", "units"],
    do_not_specialize_on_alignment=["page_tables", "context_lens", "sinks"],
)
def decode_kernel(
    out,  # [N, H, V]; written for items of one part
    partials,  # [U, H, V] float32; written for the others; None without a work list, as the next four
    partial_lse,  # [U, H] float32, base 2
    first_units,  # [N + 1]
    unit_items,  # [U]
    arrived,  # [K, U], zeros before and after
    query,  # [N, H, D]
    k_pages,  # [pages, S, K, D]
    v_pages,  # [pages, S, K, V]; not read with IN_KEYS
    page_tables,  # [N, P]
    context_lens,  # [N]
    sinks,  # [H] float32, or None
    query_stride,
    head_stride,
    table_stride,
    items,
    units,
    scale_log2,
    softcap_log2,  # or None
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    IN_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    R: tl.constexpr,  # the power of two not below GROUP
    CHUNK: tl.constexpr,  # parts that are combined at once
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One unit of one key-value head, or without a work list one item."""
    wait(EARLY)
    unit = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)  # [M]
    columns = tl.arange(0, E)
    value_columns = tl.arange(0, F)
    present = rows < GROUP
    heads = kv_head * GROUP + rows

    item = unit
    part = 0
    parts = 1
    if SPLIT:
        item, part, parts = part_of(first_units, unit_items, tl.program_id(0), items)
    context = tl.load(context_lens + item).to(tl.int32)
    if SPLIT:
        context = tl.where(part >= 0, context, 0)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    tiles_a_part = tl.cdiv(tl.cdiv(context - oldest, TILE), parts)
    begin = oldest + part * tiles_a_part * TILE
    end = tl.minimum(begin + tiles_a_part * TILE, context)

    query_tile, query_rest = load_query(
        query + item * query_stride + heads[:, None] * head_stride,
        present,
        columns,
        value_columns,
        D,
        V,
        IN_KEYS,
    )
    attended = tl.zeros([BLOCK_M, F], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    attended, total, highest = attend_keys(
        attended,
        total,
        highest,
        query_tile,
        query_rest,
        tl.full([BLOCK_M], 0, tl.int32) + (context - 1),
        k_pages + (0 if IN_KEYS else kv_head * D),
        v_pages + (0 if IN_KEYS else kv_head * V),
        page_tables + item * table_stride,
        begin,
        end,
        scale_log2,
        softcap_log2,
        None,
        None,
        None,
        0,  # begin is the oldest key in the window: no further mask
        True,
        PAGE_SIZE,
        KV_HEADS,
        D,
        E,
        V,
        F,
        IN_KEYS,
        TILE,
    )
    if SPLIT:
        # Looked up again: held over the loop they would cost registers.
        item, part, parts = part_of(first_units, unit_items, tl.program_id(0), items)
    alone = parts == 1
    # With several parts, a sink is added only once: where the parts are combined.
    total = tl.where(alone, with_sinks(total, highest, sinks, heads, present), total)
    # The largest of weights is 1, so their sum is zero without keys only.
    result = attended / tl.where(total == 0, 1.0, total)[:, None]  # [M, F]
    mask = present[:, None] & (value_columns < V)[None, :]  # [M, F]
    if alone:
        to = out + (item * KV_HEADS * GROUP + heads)[:, None] * V + value_columns[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mask)
    if SPLIT:
        lines = unit * KV_HEADS * GROUP + heads  # [M], of [U, H]
        if (parts > 1) & (part >= 0):  # each of several parts has keys
            tl.store(partial_lse + lines, highest + tl.log2(total), mask=present)
            tl.store(partials + lines[:, None] * V + value_columns[None, :], result, mask=mask)
            if arrives_last(arrived + kv_head * units + item, parts):
                combine_parts(
                    out,
                    partials,
                    partial_lse,
                    sinks,
                    item,
                    unit - part,
                    parts,
                    kv_head,
                    KV_HEADS * GROUP,
                    GROUP,
                    V,
                    F,
                    R,
                    CHUNK,
                )


@cache
def _variant(
    dtype: torch.dtype,
    heads: int,
    k_pages: tuple[int, ...],
    value_width: int,
    sliding_window: int | None,
    *,
    in_keys: bool,
    split: bool,
    combined: int,
) -> Variant:
    config = config_for(dtype, max(k_pages[3], value_width), in_keys=in_keys)
    rows = triton.next_power_of_2(heads // config.parts_of_heads(heads, k_pages[2], in_keys=in_keys))
    chunk = max(1, combined // (rows * triton.next_power_of_2(value_width)))
    return config.variant(
        decode_kernel,
        heads,
        k_pages,
        value_width,
        sliding_window,
        in_keys=in_keys,
        early=True,
        SPLIT=split,
        R=rows,
        CHUNK=chunk,
    )


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | LeadingValues,
    page_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    plan: DecodePlan | None,
) -> None:
    """Attend one token of each item to its own sequence, whose last token it is.

    Checks nothing, reads no device tensor back, and launches what follows from the shapes alone, so that it
    can be captured in a CUDA graph. Mutates `out`.

    Args:
        out: [N, H, V] contiguous, dtype of query. The rows of items without context become zeros.
        query: [N, H, D]; float32, bfloat16 or float16; any strides but the last, which is 1.
        k_pages: [pages, S, K, D] contiguous, S a power of two; dtype of query.
        v_pages: [pages, S, K, V] contiguous; dtype of query. Or the first elements of the keys, with K = 1.
        page_tables: [N, P] int32 or int64, rows contiguous; entries behind the context are not read.
        context_lens: [N] int32 or int64. 0: a padded item, for which no page is read.
        scoring: How scores become weights.
        plan: Which parts of items are read, of these lengths and the window; None: each item as a whole.
    """
    items, heads = query.shape[:2]
    width, in_keys = v_pages.shape[3], isinstance(v_pages, LeadingValues)
    if items == 0:
        return
    units, lists = items, tuple[torch.Tensor | None, ...]([None] * 5)
    if plan is not None:
        units = len(plan.unit_items)
        results, sums = (
            torch.empty((units, heads, *rest), dtype=torch.float32, device=query.device)
            for rest in ((width,), ())
        )
        lists = results, sums, plan.first_units, plan.unit_items, plan.arrived
    variant = _variant(
        query.dtype,
        heads,
        k_pages.shape,
        width,
        scoring.sliding_window,
        in_keys=in_keys,
        split=plan is not None,
        combined=COMBINED,
    )
    variant.launch(
        (units, variant.constexprs["KV_HEADS"]),
        out,
        *lists,
        query,
        k_pages,
        k_pages if in_keys else v_pages,
        page_tables,
        context_lens,
        scoring.sinks,
        query.stride(0),
        query.stride(1),
        page_tables.stride(0),
        items,
        units,
        *log2_scales(scoring),
    )
