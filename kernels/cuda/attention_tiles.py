"""The common part of decode and prefill attention: online softmax over tiles of paged keys.

The rows of a tile are (token, query head) pairs that read the same key-value head. Tiles begin at the oldest
key that any row attends to, not at a page boundary, so that a short sliding window needs few tiles.

The page numbers of a tile are loaded one iteration ahead. If they were loaded in the same iteration as the
keys, one load would depend on another. The compiler pipelines neither of them then, for any `num_stages`.

Parameters in kernels/attention_scoring.py that a model does not have are None. No code is compiled for them.

Values may be the first elements of their keys, as in latent attention. They are then loaded once for both
products, and keys are in two tiles: what is a value too, and the rest. Such pages have one key-value head. A
program takes some of its query heads, as many as its rows have room for, and the kernels' K counts these
parts.

Dimension letters: M rows; L keys of a tile; D width of a key; V width of a value, F the power of two not
below it; E that not below D, or if values are in keys not below D - V; S tokens a page; H query heads; K
key-value heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kernels import attention_trees
from kernels.attention_scoring import Scoring
from kernels.cuda.variant import Variant

# The initial value of a running maximum. It is finite: a row whose first keys are all masked would subtract
# infinity from infinity. Masked scores are -inf, and their weights are exactly zero.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(math.log2(math.e))
MAX_TREE_TOKENS = tl.constexpr(attention_trees.MAX_TREE_TOKENS)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile sizes and compile options of an attention kernel.

    Attributes:
        block_m: The least number of rows of a program; a power of two.
        tile: The number of keys of an iteration; a power of two.
        num_warps: The number of warps of a program.
        num_stages: The number of stages in which keys and values are loaded.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int

    def variant(
        self,
        kernel: Any,
        heads: int,
        k_pages: Sequence[int],
        value_width: int,
        sliding_window: int | None,
        *,
        in_keys: bool,
        early: bool = False,
        **others: Any,
    ) -> Variant:
        """The variant of a kernel for a layer.

        Args:
            kernel: The decode or the prefill kernel.
            heads: H.
            k_pages: The shape [pages, S, K, D].
            value_width: V.
            sliding_window: The number of positions that a token attends to; None: all.
            in_keys: Whether values are the first elements of their keys.
            early: Whether launches begin early; see `Variant`.
            others: The constants that only this kernel has.
        """
        _, page_size, kv_heads, width = k_pages
        parts = self.parts_of_heads(heads, kv_heads, in_keys=in_keys)
        group = heads // parts
        constexprs = {
            "KV_HEADS": parts,
            "GROUP": group,
            "D": width,
            "E": max(16, triton.next_power_of_2(width - value_width if in_keys else width)),
            "V": value_width,
            "F": max(16, triton.next_power_of_2(value_width)),
            "IN_KEYS": in_keys,
            "PAGE_SIZE": page_size,
            "WINDOW": sliding_window or 0,
            "BLOCK_M": max(self.block_m, triton.next_power_of_2(group)),
            "TILE": self.tile,
        }
        return Variant(kernel, constexprs | others, self.num_warps, self.num_stages, early)

    def parts_of_heads(self, heads: int, kv_heads: int, *, in_keys: bool) -> int:
        """Over how many programs the query heads of a token are divided, equally.

        One for each key-value head; of the only one of values that are in keys as few as have rows for them.
        """
        if not in_keys:
            return kv_heads
        fitting = range(min(self.block_m, heads), 0, -1)
        return heads // next(group for group in fitting if heads % group == 0)


def log2_scales(scoring: Scoring) -> tuple[float, float | None]:
    """The scale and the softcap of scores to base 2."""
    log2_e = math.log2(math.e)
    return scoring.scale * log2_e, None if scoring.softcap is None else scoring.softcap * log2_e


@triton.jit
def load_columns(queries, present, columns, WIDTH: tl.constexpr):
    """The first WIDTH columns of queries at pointers [M, 1]; zeros beyond, and in rows not present."""
    return tl.load(queries + columns[None, :], mask=present[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_query(
    queries,  # pointers [M, 1]
    present,  # [M]
    columns,  # [E]
    value_columns,  # [F]
    D: tl.constexpr,
    V: tl.constexpr,
    IN_KEYS: tl.constexpr,
):
    """The tile or the two tiles of queries that `attend_keys` takes."""
    if IN_KEYS:
        query = load_columns(queries, present, value_columns, V)  # [M, F]
        rest = load_columns(queries + V, present, columns, D - V)  # [M, E]
    else:
        query = load_columns(queries, present, columns, D)  # [M, E]
        rest = query  # not read
    return query, rest


@triton.jit
def load_rows(
    base, slots, present, ROW_STRIDE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr
):
    """Load one head of each slot [L, E]; zeros for slots that are not present, and beyond D.

    Slots that are not present must not be read: they may hold NaN, and 0 * NaN is NaN.
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
def hyperbolic_tangent(x):
    """The hyperbolic tangent with a small relative error.

    Triton has none that runs on all devices and in the interpreter. Near zero it is the odd polynomial with
    the least relative error on [-0.5, 0.5], 1.5e-8.
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    series = square * (
        -3.3333144e-1 + square * (1.3325879e-1 + square * (-5.3045494e-2 + square * 1.7241490e-2))
    )
    near = size + size * series
    positive = tl.where(size < 0.5, near, far)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def scores_of(
    products,  # [M, L] float32, of queries and keys
    scale_log2,
    softcap_log2,  # or None
):
    """Scores to base 2, [M, L], not masked."""
    if softcap_log2 is not None:
        scores = softcap_log2 * hyperbolic_tangent(products * (scale_log2 / softcap_log2))
    else:
        scores = products * scale_log2
    return scores


@triton.jit
def with_sinks(total, highest, sinks, heads, present):
    """The sum of weights with that of each row's sink, [M].

    It is infinite where a sink is far above all scores, or there are no scores. The row is divided by it, and
    becomes zeros.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=present, other=0.0) * LOG2_E
        total += tl.exp2(sink - highest)
    return total


@triton.jit
def tree_of(roots, ancestors, depths, item, token_rows, present):
    """The slot of an item's root, the ancestors of each row [M], and a pointer to the item's depths.

    An item that is not a tree has a root after its last token.
    """
    root = tl.load(roots + item).to(tl.int32)
    row_ancestors = tl.load(ancestors + token_rows, mask=present, other=0)
    return root, row_ancestors, depths + item.to(tl.int64) * MAX_TREE_TOKENS


@triton.jit
def tree_positions(keys, root, depths):
    """The positions of the tokens in slots `keys` [L] of an item whose tree begins at `root`.

    depths: pointer to those of the item's tree.
    """
    places = keys - root
    among = (places >= 0) & (places < MAX_TREE_TOKENS)
    return tl.where(among, root + tl.load(depths + places, mask=among, other=0), keys)


@triton.jit
def seen_in_tree(keys, root, ancestors):
    """Whether rows attend to keys [L], [M, L]: to keys before the tree and to ancestors [M] (int64)."""
    places = keys - root
    # Words of 32 bits: a 64-bit number for each pair of tokens would need too many registers.
    low = (ancestors & 0xFFFFFFFF).to(tl.int32)
    high = (ancestors >> 32).to(tl.int32)
    words = tl.where((places < 32)[None, :], low[:, None], high[:, None])
    is_ancestor = ((words >> (places & 31)[None, :]) & 1) != 0
    return (places < 0)[None, :] | (is_ancestor & (places < MAX_TREE_TOKENS)[None, :])


@triton.jit
def attend_keys(
    attended,  # [M, F] float32, weighted sum of values so far
    total,  # [M] float32, sum of weights so far
    highest,  # [M] float32, largest score so far
    query,  # [M, E], or with IN_KEYS [M, F]
    query_rest,  # [M, E]; not read without IN_KEYS
    row_positions,  # [M] int32, position of the token of each row
    k_head,  # pointer to this head of the first slot of page 0
    v_head,  # not read with IN_KEYS
    table,  # pointer to the page numbers of this item
    begin,
    end,
    scale_log2,
    softcap_log2,  # or None
    root,  # slot of the first token of a tree; or None, and the next two: no item is a tree
    ancestors,  # [M] int64, as in `TokenTrees`
    depths,  # pointer to those of this item
    WINDOW: tl.constexpr,  # 0: none
    MASKED: tl.constexpr,  # False: all rows attend to all keys, and end - begin is a multiple of TILE
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    IN_KEYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the keys begin .. end - 1 with all rows. Returns the new (attended, total, highest)."""
    keys = begin + tl.arange(0, TILE)  # [L]
    pages = tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)  # [L]
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        slots = pages * PAGE_SIZE + keys % PAGE_SIZE
        following = keys + TILE
        pages = tl.load(table + following // PAGE_SIZE, mask=following < end, other=0).to(tl.int64)

        if IN_KEYS:
            value = load_rows(k_head, slots, keys < end, D, V, F, MASKED)  # [L, F]
            rest = load_rows(k_head + V, slots, keys < end, D, D - V, E, MASKED)  # [L, E]
            products = tl.dot(query, tl.trans(value), input_precision="ieee")  # [M, L]
            products = tl.dot(query_rest, tl.trans(rest), products, input_precision="ieee")
        else:
            key = load_rows(k_head, slots, keys < end, KV_HEADS * D, D, E, MASKED)  # [L, E]
            products = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, L]
        positions = keys
        if ancestors is not None:
            positions = tree_positions(keys, root, depths)
        scores = scores_of(products, scale_log2, softcap_log2)
        if MASKED:
            seen = positions[None, :] <= row_positions[:, None]  # [M, L]
            if WINDOW > 0:
                seen = seen & (positions[None, :] > row_positions[:, None] - WINDOW)
            if ancestors is not None:
                seen = seen & seen_in_tree(keys, root, ancestors) & (keys < end)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])  # [M, L]
        correction = tl.exp2(highest - raised)  # [M]
        highest = raised
        total = total * correction + tl.sum(weights, 1)
        if not IN_KEYS:
            value = load_rows(v_head, slots, keys < end, KV_HEADS * V, V, F, MASKED)  # [L, F]
        attended = attended * correction[:, None]
        weights = weights.to(value.dtype)  # type: ignore[possibly-undefined]
        attended = tl.dot(weights, value, attended, input_precision="ieee")
    return attended, total, highest
