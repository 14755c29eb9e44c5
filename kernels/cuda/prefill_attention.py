"""Causal paged attention of items with any number of new tokens, from prefill chunks to single tokens.

A program computes a block of rows: some tokens of one item, each with the G query heads of a key-value head,
so that keys are read once for the group. All rows of a block attend to most of its keys. The loop over these
keys has no masks; a second loop, with masks, processes the rest.

With BATCH_INVARIANT the bits of a row depend on its sequence only, not on the other rows of its block. The
loop with masks then processes all keys, since in the other one the compiler fuses the scaling of a score with
the subtraction of the maximum, which saves a rounding. With a window too its tiles begin at multiples of
TILE, so up to TILE - 1 keys before the window are read.

A program finds its item by binary search on the device, so the grid depends on T and N only. The blocks of
item i begin at start[i] // Q + i, which is enough for the ceil(tokens / Q) blocks of each item. Programs
without a block return.

Compiled for sm_90 with Triton 3.7.1, bfloat16, G = 4; nothing spills, and wgmma is used:

    width     rows   keys a tile   warps   stages   registers   shared memory   buffers each of K and V
    64        128    64            8       3        117         64 KiB          3
    80, 96    128    64            8       3        190         128 KiB         3
    128       128    64            8       3        188         128 KiB         3
    256       128    32            8       3        240         160 KiB         3

With a width of 128, 4 warps need 255 registers and spill. A width of 256 spills with tiles of 64 keys.

Devices with less shared memory have no wgmma, and need more registers. For sm_89 (sm_80 differs in registers
only) nothing spills; with tiles of 64 keys, windows and groups of 7 would:

    width     rows   keys a tile   warps   stages   registers   shared memory   buffers each of K and V
    64        128    32            8       3        144         32 KiB          2
    80-128    128    32            8       3        184-188     64 KiB          2
    256       64     16            8       3        187         66 KiB          2

No matrix instruction has the precision of float32. With a width of 128, 32 rows spill. With 16 rows, some
groups and windows spill 8 or 16 bytes, such as G = 8 with a width of 64.

The optional parameters of kernels/attention_scoring.py fit the same tiles: on sm_90, soft-capping with a
width of 256 needs 247 registers, sinks with 64 need 119. Keys of 192 and values of
128 need 140 registers and 136 KiB, with the tiles of a width of 256.

Keys of 576 whose first 512 elements are values have tiles of their own. With 128 query heads nothing spills:

    device    rows   keys a tile   warps   stages   registers   shared memory   buffers of keys
    sm_90     64     32            8       3        234         180 KiB         3
    sm_89     32     16            8       3        162         73 KiB          2

Batches with token trees have their own variant. With bfloat16 it does not spill: on sm_90 it needs 190
registers for a width of 128, and 254 for soft-capping with 256. With float32 and widths below 256 it may
spill 8 or 16 bytes.

Dimension letters: T tokens; N items; H query heads; K key-value heads; G = H / K; D width of a key, E the
power of two not below it; V and F the same of a value; P pages in the longest page table; S tokens a page; M
rows of a block; Q = M // G.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.attention_scoring import Scoring
from kernels.attention_trees import TokenTrees
from kernels.cuda.attention_tiles import (
    LOWEST,
    TileConfig,
    attend_keys,
    load_query,
    log2_scales,
    tree_of,
    tree_positions,
    with_sinks,
)
from kernels.cuda.variant import SHARED_BYTES, Variant
from kernels.packed_pages import LeadingValues


def config_for(dtype: torch.dtype, width: int, shared_bytes: int, *, in_keys: bool = False) -> TileConfig:
    """The configuration for a dtype and head width.

    Args:
        dtype: Of queries, keys and values.
        width: The wider of D and V.
        shared_bytes: The shared memory that a program may use on the device.
        in_keys: Values are the first elements of their keys.

    Raises:
        ValueError: The device has too little shared memory.
    """
    if shared_bytes < SHARED_BYTES[89]:
        raise ValueError(
            f"prefill attention needs {SHARED_BYTES[89] >> 10} KiB of shared memory a program,"
            f" and this device has {shared_bytes >> 10} KiB"
        )
    if in_keys:
        return _config_in_keys(dtype, shared_bytes)
    if dtype is torch.float32:
        # With 3 stages Triton 3.6 spills for keys of 192 and values of 128. Others have no room for 4 stages.
        return TileConfig(block_m=16, tile=16, num_warps=4, num_stages=4 if width == 192 else 3)
    if shared_bytes >= SHARED_BYTES[90]:
        return TileConfig(block_m=128, tile=64 if width <= 128 else 32, num_warps=8, num_stages=3)
    if width <= 128:
        return TileConfig(block_m=128, tile=32, num_warps=8, num_stages=3)
    return TileConfig(block_m=64, tile=16, num_warps=8, num_stages=3)


def _config_in_keys(dtype: torch.dtype, shared_bytes: int) -> TileConfig:
    """For values that are in their keys, of up to 512 and 64 elements more."""
    if dtype is torch.float32:
        return TileConfig(block_m=16, tile=16, num_warps=4, num_stages=2)
    if shared_bytes >= SHARED_BYTES[90]:
        return TileConfig(block_m=64, tile=32, num_warps=8, num_stages=3)
    return TileConfig(block_m=32, tile=16, num_warps=8, num_stages=3)


@triton.jit
def find_block(query_starts, block, num_items, BLOCK_Q: tl.constexpr):
    """The item of a block, its first row and number of tokens, and the first of its tokens in the block.

    The item is the last one whose blocks begin at or before this block.
    """
    first_row = tl.load(query_starts).to(tl.int32)
    low = 0
    high = num_items
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(query_starts + middle).to(tl.int32) - first_row) // BLOCK_Q + middle
        if begins <= block:
            low = middle
        else:
            high = middle
    item_row = tl.load(query_starts + low).to(tl.int32) - first_row
    query_len = tl.load(query_starts + low + 1).to(tl.int32) - first_row - item_row
    return low, item_row, query_len, (block - (item_row // BLOCK_Q + low)) * BLOCK_Q


@triton.jit
def first_key(oldest, WINDOW: tl.constexpr, BATCH_INVARIANT: tl.constexpr, TILE: tl.constexpr):
    """The first key for a block of rows, of which the oldest is at position `oldest`."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0)
        if BATCH_INVARIANT:
            begin = begin // TILE * TILE
    return begin


# Slices of a batch begin at any address, and table widths change: neither may compile another variant.
@triton.jit(
    do_not_specialize=["table_stride", "num_items"],
    do_not_specialize_on_alignment=[
        *("page_tables", "query_starts", "context_lens", "sinks"),
        *("roots", "ancestors", "depths"),
    ],
)
def prefill_kernel(
    out,  # [T, H, V]
    query,  # [T, H, D]
    k_pages,  # [pages, S, K, D]
    v_pages,  # [pages, S, K, V]; not read with IN_KEYS
    page_tables,  # [N, P]
    query_starts,  # [N + 1]
    context_lens,  # [N]
    sinks,  # [H] float32, or None
    roots,  # [N] or None, and the next two: no item is a tree
    ancestors,  # [T] int64
    depths,  # [N, MAX_TREE_TOKENS]
    query_stride,
    head_stride,
    table_stride,
    num_items,
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
    BATCH_INVARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """One block of one key-value head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # noqa: N806
    # The last blocks of an item have the most keys. They start first, so that the short ones run at the end.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    item, item_row, query_len, first_token = find_block(query_starts, block, num_items, BLOCK_Q)
    if first_token >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)  # [M]
    columns = tl.arange(0, E)
    value_columns = tl.arange(0, F)
    # rows // GROUP, exact if rows * GROUP < 2^16. With a division, and a group that is not a power of two,
    # ptxas puts instructions between the wgmma and serialises them (its warning C7515).
    tokens = first_token + ((rows * (65536 // GROUP + 1)) >> 16)  # [M]
    heads = kv_head * GROUP + rows % GROUP
    present = (tokens < query_len) & (rows < BLOCK_Q * GROUP)
    token_rows = (item_row + tokens).to(tl.int64)

    start_position = tl.load(context_lens + item).to(tl.int32) - query_len  # of the first new token
    end = start_position + tl.minimum(first_token + BLOCK_Q, query_len)
    positions = start_position + tokens  # [M]
    oldest = start_position + first_token  # of the rows; all attend to it, if it is inside their windows
    root = None
    row_ancestors = None
    tree_depths = None
    if roots is not None:
        root, row_ancestors, tree_depths = tree_of(roots, ancestors, depths, item, token_rows, present)
        positions = tree_positions(positions, root, tree_depths)
        oldest = tl.minimum(oldest, root)
    begin = first_key(oldest, WINDOW, BATCH_INVARIANT, TILE)

    query_tile, query_rest = load_query(
        query + token_rows[:, None] * query_stride + heads[:, None] * head_stride,
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
    k_head = k_pages + (0 if IN_KEYS else kv_head * D)
    v_head = v_pages + (0 if IN_KEYS else kv_head * V)
    table = page_tables + item.to(tl.int64) * table_stride
    if WINDOW == 0 and not BATCH_INVARIANT and not IN_KEYS:
        # Padding items begin at a negative position.
        bulk_end = tl.maximum(oldest + 1, 0) // TILE * TILE
        attended, total, highest = attend_keys(
            attended,
            total,
            highest,
            query_tile,
            query_rest,
            positions,
            k_head,
            v_head,
            table,
            begin,
            bulk_end,
            scale_log2,
            softcap_log2,
            None,
            None,
            None,
            WINDOW,
            False,
            PAGE_SIZE,
            KV_HEADS,
            D,
            E,
            V,
            F,
            IN_KEYS,
            TILE,
        )
        begin = bulk_end
    attended, total, highest = attend_keys(
        attended,
        total,
        highest,
        query_tile,
        query_rest,
        positions,
        k_head,
        v_head,
        table,
        begin,
        end,
        scale_log2,
        softcap_log2,
        root,
        row_ancestors,
        tree_depths,
        WINDOW,
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
    total = with_sinks(total, highest, sinks, heads, present)
    result = attended / tl.where(total > 0, total, 1.0)[:, None]  # zeros for a padding item
    lines = token_rows * (KV_HEADS * GROUP) + heads  # [M], of [T, H]
    to = out + lines[:, None] * V + value_columns[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=present[:, None] & (value_columns < V)[None, :])


@cache
def _variant(
    dtype: torch.dtype,
    heads: int,
    k_pages: tuple[int, ...],
    value_width: int,
    sliding_window: int | None,
    shared_bytes: int,
    *,
    in_keys: bool,
    batch_invariant: bool,
) -> Variant:
    config = config_for(dtype, max(k_pages[3], value_width), shared_bytes, in_keys=in_keys)
    return config.variant(
        prefill_kernel,
        heads,
        k_pages,
        value_width,
        sliding_window,
        in_keys=in_keys,
        BATCH_INVARIANT=batch_invariant,
    )


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | LeadingValues,
    page_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scoring: Scoring,
    shared_bytes: int,
    trees: TokenTrees | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """Attend the new tokens of each item to its own sequence, whose last tokens they are.

    Checks nothing, reads no device tensor, and launches what follows from the shapes alone, so that it can be
    captured in a CUDA graph. Mutates `out`.

    Args:
        out: [T, H, V] contiguous, dtype of query. The rows of items without context become zeros.
        query: [T, H, D]; float32, bfloat16 or float16; any strides but the last, which is 1.
        k_pages: [pages, S, K, D] contiguous, S a power of two; dtype of query.
        v_pages: [pages, S, K, V] contiguous; dtype of query. Or the first elements of the keys, with K = 1.
        page_tables: [N, P] int32 or int64, rows contiguous; entries after the context are not read.
        query_starts: [N + 1] int32 or int64, ascending: the first row of each item, and the end, relative to
            the first entry, so that a slice of a batch is a batch. Rows after the end are not written.
        context_lens: [N] int32 or int64, new tokens included. 0: a padding item, for which no page is read.
        scoring: How scores become weights.
        shared_bytes: The shared memory that a program may use, which determines the tiles; see `config_for`.
        trees: Which items are trees, contiguous, on the device of query; or None.
        batch_invariant: The bits of a row must depend on its sequence only.
    """
    rows, heads, _ = query.shape
    in_keys = isinstance(v_pages, LeadingValues)
    items = len(context_lens)
    if rows == 0:
        return
    variant = _variant(
        query.dtype,
        heads,
        k_pages.shape,
        v_pages.shape[3],
        scoring.sliding_window,
        shared_bytes,
        in_keys=in_keys,
        batch_invariant=batch_invariant,
    )
    tokens_a_block = variant.constexprs["BLOCK_M"] // variant.constexprs["GROUP"]
    blocks = rows // tokens_a_block + items
    variant.launch(
        (blocks * variant.constexprs["KV_HEADS"],),
        out,
        query,
        k_pages,
        k_pages if in_keys else v_pages,
        page_tables,
        query_starts,
        context_lens,
        scoring.sinks,
        *((None, None, None) if trees is None else (trees.roots, trees.ancestors, trees.depths)),
        query.stride(0),
        query.stride(1),
        page_tables.stride(0),
        items,
        *log2_scales(scoring),
    )
