"""Paged attention of one token per item, the keys of an item split over several programs.

A program reads some of the keys of one key-value head, for the G query heads that share it, padded to the 16
rows of a matrix instruction. The result of an item depends only on the item and the number of splits.

Compiled for sm_90 with Triton 3.7.1, bfloat16, G = 4, several splits; nothing spills:

    width     keys a tile   warps   stages   registers   shared memory   buffers each of K and V
    64        64            4       4        62          52 KiB          3
    80, 96    64            4       3        96          70 KiB          2
    128       64            4       3        96          70 KiB          2
    256       32            4       3        126         73 KiB          2

Three programs run on a multiprocessor at once. With a width of 256, tiles of 64 keys need 212 registers and
138 KiB. No matrix instruction has the precision of float32: with a width of 128, tiles of 32 keys spill, and
tiles of 16 do not.

The optional parameters of kernels/attention_scoring.py need up to 2 more registers. Keys of 192 and values of
128 need 80 registers and 57 KiB, with the tiles of a width of 256.

Dimension letters: N items; H query heads; K key-value heads; G = H / K; D width of a key, E the power of two
not below it; V and F the same of a value; P pages in the longest page table; S tokens a page; C splits; M
rows (G and padding).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.attention_scoring import Scoring
from kernels.cuda.attention_tiles import (
    LOWEST,
    TileConfig,
    attend_keys,
    feature_types,
    log2_scales,
    slopes_of,
    widths_name,
    with_sinks,
)
from kernels.cuda.combine_splits import combine_splits
from kernels.cuda.compile_spec import DTYPES, CompileSpec, Expectations, Variant

# The number of programs that run on a multiprocessor at once, limited by their shared memory.
PROGRAMS_A_MULTIPROCESSOR = 3
# With fewer keys in a split, starting it and adding its result would take most of the time.
MIN_SPLIT_KEYS = 128
MAX_SPLITS = 128


def config_for(dtype: torch.dtype, width: int) -> TileConfig:
    """The configuration for a dtype and head width, the wider of keys and values."""
    if dtype is torch.float32:
        return TileConfig(block_m=16, tile=16, num_warps=4, num_stages=3)
    if width <= 64:
        return TileConfig(block_m=16, tile=64, num_warps=4, num_stages=4)
    return TileConfig(block_m=16, tile=64 if width <= 128 else 32, num_warps=4, num_stages=3)


def num_splits_for(batch: int, kv_heads: int, max_context: int, multiprocessors: int) -> int:
    """The number of splits for the keys of each item.

    As many as run on the device at once, but none with less than MIN_SPLIT_KEYS keys if all items have the
    length of the longest.

    Args:
        batch: The number of items, padding items included.
        kv_heads: K.
        max_context: The most tokens of an item.
        multiprocessors: The number of multiprocessors of the device.

    Returns:
        1 .. MAX_SPLITS.
    """
    room = PROGRAMS_A_MULTIPROCESSOR * multiprocessors // max(batch * kv_heads, 1)
    return max(1, min(room, -(-max_context // MIN_SPLIT_KEYS), MAX_SPLITS))


# Slices of a batch begin at any address, and table widths change: neither may compile another variant.
@triton.jit(
    do_not_specialize=["table_stride", "num_splits"],
    do_not_specialize_on_alignment=["page_tables", "context_lens", "sinks", "alibi_slopes"],
)
def decode_kernel(
    out,  # [N, H, V]; written when there is one split
    partials,  # [N, H, C, V] float32; written when there are several
    partial_lse,  # [N, H, C] float32, base 2
    query,  # [N, H, D]
    k_pages,  # [pages, S, K, D]
    v_pages,  # [pages, S, K, V]
    page_tables,  # [N, P]
    context_lens,  # [N]
    sinks,  # [H] float32, or None; with several splits it is None here
    alibi_slopes,  # [H] float32, or None
    query_stride,
    head_stride,
    table_stride,
    num_splits,
    scale_log2,
    softcap_log2,  # or None
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """One split of one key-value head of one item."""
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)  # [M]
    columns = tl.arange(0, E)
    value_columns = tl.arange(0, F)
    present = rows < GROUP
    heads = kv_head * GROUP + rows

    context = tl.load(context_lens + item).to(tl.int32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    tiles_a_split = tl.cdiv(tl.cdiv(context - oldest, TILE), num_splits)
    begin = oldest + split * tiles_a_split * TILE
    end = tl.minimum(begin + tiles_a_split * TILE, context)

    query_tile = tl.load(
        query + item * query_stride + heads[:, None] * head_stride + columns[None, :],
        mask=present[:, None] & (columns < D)[None, :],
        other=0.0,
    )  # [M, E]
    attended = tl.zeros([BLOCK_M, F], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    attended, total, highest = attend_keys(
        attended,
        total,
        highest,
        query_tile,
        tl.full([BLOCK_M], 0, tl.int32) + (context - 1),
        k_pages + kv_head * D,
        v_pages + kv_head * V,
        page_tables + item * table_stride,
        begin,
        end,
        scale_log2,
        softcap_log2,
        slopes_of(alibi_slopes, heads, present),
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
        TILE,
    )
    empty = begin >= end
    total = with_sinks(total, highest, sinks, heads, present)
    result = attended / tl.where(empty, 1.0, total)[:, None]  # [M, F]
    mask = present[:, None] & (value_columns < V)[None, :]  # [M, F]
    lines = item * KV_HEADS * GROUP + heads  # [M], of [N, H]
    if SPLIT:
        parts = lines * num_splits + split  # [M], of [N, H, C]
        lse = tl.where(empty, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + parts, lse, mask=present)
        if begin < end:
            tl.store(partials + parts[:, None] * V + value_columns[None, :], result, mask=mask)
    else:
        to = out + lines[:, None] * V + value_columns[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mask)


@cache
def _variant(
    dtype: torch.dtype,
    heads: int,
    k_pages: tuple[int, ...],
    value_width: int,
    sliding_window: int | None,
    *,
    split: bool,
) -> Variant:
    config = config_for(dtype, max(k_pages[3], value_width))
    return config.variant(decode_kernel, heads, k_pages, value_width, sliding_window, SPLIT=split)


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    num_splits: int,
) -> None:
    """Attend one token of each item to its own sequence, whose last token it is.

    Checks nothing, reads no device tensor, and launches what follows from the shapes and `num_splits` alone,
    so that it can be captured in a CUDA graph. Mutates `out`.

    Args:
        out: [N, H, V] contiguous, dtype of query. The rows of items without context become zeros.
        query: [N, H, D]; float32, bfloat16 or float16; any strides but the last, which is 1.
        k_pages: [pages, S, K, D] contiguous, S a power of two; dtype of query.
        v_pages: [pages, S, K, V] contiguous; dtype of query.
        page_tables: [N, P] int32 or int64, rows contiguous; entries behind the context are not read.
        context_lens: [N] int32 or int64. 0: a padded item, for which no page is read.
        scoring: How scores become weights.
        num_splits: The number of parts in which the keys of an item are read; see `num_splits_for`.
    """
    items, heads = query.shape[:2]
    width = v_pages.shape[3]
    kv_heads = k_pages.shape[2]
    if items == 0:
        return
    partials = partial_lse = None
    if num_splits > 1:
        shape = (items, heads, num_splits)
        partials = torch.empty((*shape, width), dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    variant = _variant(query.dtype, heads, k_pages.shape, width, scoring.sliding_window, split=num_splits > 1)
    variant.launch(
        (items, kv_heads, num_splits),
        out,
        partials,
        partial_lse,
        query,
        k_pages,
        v_pages,
        page_tables,
        context_lens,
        scoring.sinks if partials is None else None,
        scoring.alibi_slopes,
        query.stride(0),
        query.stride(1),
        page_tables.stride(0),
        num_splits,
        *log2_scales(scoring),
    )
    if partials is not None and partial_lse is not None:
        combine_splits(out, partials, partial_lse, scoring.sinks)


def compile_specs() -> list[CompileSpec]:
    """Each dtype and head width, with and without splits, a window, and what some models have beside."""
    shapes: list[tuple[str, int, int, bool, int | None, str]] = [
        ("bf16", width, width, True, None, "") for width in (64, 80, 96, 128, 256)
    ]
    shapes += [("bf16", 128, 128, False, None, ""), ("bf16", 128, 128, True, 4096, "")]
    shapes += [("fp16", 128, 128, True, None, "")]
    shapes += [("fp32", width, width, True, None, "") for width in (64, 128, 256)]
    shapes += [("bf16", 64, 64, False, 128, "sinks"), ("bf16", 128, 128, True, None, "alibi_slopes")]
    for dtype in ("bf16", "fp32"):
        shapes += [(dtype, 192, 128, True, None, ""), (dtype, 256, 256, True, 4096, "softcap_log2")]
    return [_compile_spec(*shape) for shape in shapes]


def _compile_spec(
    dtype: str,
    width: int,
    value_width: int,
    split: bool,
    window: int | None,
    feature: str,
) -> CompileSpec:
    variant = _variant(DTYPES[dtype], 32, (1, 16, 8, width), value_width, window, split=split)
    pointers = dict.fromkeys(("out", "query", "k_pages", "v_pages"), f"*{dtype}")
    absent = {} if split else {"partials": None, "partial_lse": None}
    if split:
        pointers |= {"partials": "*fp32", "partial_lse": "*fp32"}
    return CompileSpec(
        variant,
        f"decode_attention {dtype} {widths_name(width, value_width)}{' split' if split else ''}"
        f" window={window} {feature}".rstrip(),
        {
            **pointers,
            **absent,
            **feature_types(feature),
            **dict.fromkeys(("page_tables", "context_lens"), "*i32"),
            **dict.fromkeys(("query_stride", "head_stride", "table_stride", "num_splits"), "i32"),
            "scale_log2": "fp32",
        },
        divisible_by_16=(*pointers, "query_stride", "head_stride"),
        expects=Expectations(kv_buffers=variant.num_stages - 1),
    )
