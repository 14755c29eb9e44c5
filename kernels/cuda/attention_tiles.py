"""What decode and prefill attention share: online softmax over tiles of paged keys.

The rows of a tile are (token, query head) pairs that read the same key-value head. Tiles begin at the oldest
key that any row sees, not at a page boundary, so that a short sliding window costs few tiles.

The page numbers of a tile are loaded one iteration ahead. In the same iteration as the keys, they would be a
load that another load waits for, and the compiler pipelines neither: one buffer whatever `num_stages`.

Dimension letters: M rows; L keys of a tile; D head width; E the power of two not below it; S tokens a page;
K key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kernels.cuda.compile_spec import Variant

# Where a running maximum begins. Finite, so that a row whose first keys are all hidden subtracts no
# infinities. Scores of hidden keys are -inf, and their weights exact zeros.
LOWEST = tl.constexpr(-3.0e38)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How an attention kernel is compiled.

    Attributes:
        block_m: Rows of a program, at least; a power of two.
        tile: Keys of an iteration, a power of two.
        num_warps: Warps of a program.
        num_stages: Stages of the pipeline, over the loads of keys and values.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int

    def variant(
        self, kernel: Any, heads: int, k_pages: Sequence[int], sliding_window: int | None, **others: Any
    ) -> Variant:
        """What a kernel is compiled for.

        Args:
            kernel: One of the two.
            heads: Query heads.
            k_pages: Shape [pages, S, K, D].
            sliding_window: Positions a token sees, or None.
            others: Constants that only this kernel has.
        """
        _, page_size, kv_heads, width = k_pages
        group = heads // kv_heads
        constexprs = {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "D": width,
            "E": max(16, triton.next_power_of_2(width)),
            "PAGE_SIZE": page_size,
            "WINDOW": sliding_window or 0,
            "BLOCK_M": max(self.block_m, triton.next_power_of_2(group)),
            "TILE": self.tile,
        }
        return Variant(kernel, constexprs | others, self.num_warps, self.num_stages)


@triton.jit
def load_rows(
    base, slots, present, ROW_STRIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr
):
    """Load one head of each slot; zeros where a slot is not present and beyond D.

    Absent slots must not be read at all: they may hold NaN, and 0 * NaN is NaN.
    """
    columns = tl.arange(0, E)
    addresses = base + slots[:, None] * ROW_STRIDE + columns[None, :]  # [L, E]
    within = (columns < D)[None, :]
    if MASKED and D != E:
        rows = tl.load(addresses, mask=present[:, None] & within, other=0.0)
    elif MASKED:
        rows = tl.load(addresses, mask=present[:, None], other=0.0)
    elif D != E:
        rows = tl.load(addresses, mask=within, other=0.0)
    else:
        rows = tl.load(addresses)
    return rows


@triton.jit
def attend_keys(
    attended,  # [M, E] float32, weighted sum of values so far
    total,  # [M] float32, sum of weights so far
    highest,  # [M] float32, largest score so far
    query,  # [M, E]
    row_positions,  # [M] int32, position of the token of each row
    k_head,  # pointer to this head of the first slot of page 0
    v_head,
    table,  # pointer to the page numbers of this item
    begin,
    end,
    scale_log2,
    WINDOW: tl.constexpr,  # 0: none
    MASKED: tl.constexpr,  # False: every row sees every key, and end - begin is a multiple of TILE
    PAGE_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,  # elements from a slot to the next: key-value heads * D
    D: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend all rows to the keys begin .. end - 1. Returns the new (attended, total, highest)."""
    keys = begin + tl.arange(0, TILE)  # [L]
    pages = tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)  # [L]
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        slots = pages * PAGE_SIZE + keys % PAGE_SIZE
        following = keys + TILE
        pages = tl.load(table + following // PAGE_SIZE, mask=following < end, other=0).to(tl.int64)

        key = load_rows(k_head, slots, keys < end, ROW_STRIDE, D, E, MASKED)  # [L, E]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2  # [M, L]
        if MASKED:
            seen = keys[None, :] <= row_positions[:, None]  # [M, L]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > row_positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])  # [M, L]
        correction = tl.exp2(highest - raised)  # [M]
        highest = raised
        total = total * correction + tl.sum(weights, 1)
        value = load_rows(v_head, slots, keys < end, ROW_STRIDE, D, E, MASKED)  # [L, E]
        attended = attended * correction[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
    return attended, total, highest
