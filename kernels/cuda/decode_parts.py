"""Items that several programs of decode attention read: which part is whose, and the result of all parts.

The program that comes last combines the parts of an item, so no further launch does. They are added in the
order of the parts, whichever came last.

Dimension letters: N items; H query heads; K key-value heads; U units of the work list; V width of a value, F
the power of two not below it; R the power of two not below H / K; C parts that are combined at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.attention_tiles import LOWEST, with_sinks


@triton.jit
def part_of(first_units, unit_items, unit, items):
    """The item of a unit, which of its parts the unit is, and of how many.

    A unit without an item is part -1 of 2 of the last one: it has no keys, and nobody reads its result.
    """
    planned = tl.load(unit_items + unit)
    item = tl.minimum(planned, items - 1).to(tl.int64)
    first = tl.load(first_units + item)
    idle = planned == items
    parts = tl.where(idle, 2, tl.load(first_units + item + 1) - first)
    return item, tl.where(idle, -1, unit - first), parts


@triton.jit
def arrives_last(count, parts):
    """Whether the other parts were written before this one, which the program has just written.

    If so, the program sees what they wrote, and `count` is 0 again. Each part of the item has to call this.
    """
    tl.debug_barrier()  # all threads of the program have written
    is_last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1
    tl.store(count, 0, mask=is_last)
    return is_last


@triton.jit
def combine_parts(
    out,  # [N, H, V], written
    partials,  # [U, H, V] float32
    partial_lse,  # [U, H] float32, base 2
    sinks,  # [H] float32, or None
    item,
    first,  # the item's first unit
    parts,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Average the results of an item's parts by the sums of their weights, in the order of the parts.

    Sinks are added here and not in the parts, so that they count once.
    """
    row = tl.arange(0, R)
    is_head, heads = row < GROUP, kv_head * GROUP + row  # [R]
    columns = tl.arange(0, F)
    result = tl.zeros([R, F], tl.float32)
    total = tl.zeros([R], tl.float32)
    highest = tl.full([R], LOWEST, tl.float32)
    for start in range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)[:, None]  # [C, 1]
        written = (part < parts) & is_head[None, :]  # [C, R]
        lines = (first + part).to(tl.int64) * HEADS + heads[None, :]
        # Not by the cache of a multiprocessor: other programs have just written these.
        lse = tl.load(partial_lse + lines, mask=written, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partials + lines[:, :, None] * V + columns[None, None, :],
            mask=written[:, :, None] & (columns < V)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [C, R, F]
        raised = tl.maximum(highest, tl.max(lse, 0))  # [R]
        weights = tl.exp2(lse - raised[None, :])  # [C, R]
        correction = tl.exp2(highest - raised)
        result = result * correction[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * correction + tl.sum(weights, 0)
        highest = raised
    total = with_sinks(total, highest, sinks, heads, is_head)
    result = result / tl.where(is_head, total, 1.0)[:, None]
    to = out + (item * HEADS + heads)[:, None] * V + columns[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=is_head[:, None] & (columns < V)[None, :])
