"""Combines the partial results of decode attention, for items that are read in several parts.

A partial result is the weighted average of the values of a part, and the base-2 logarithm of the sum of its
weights, by which the averages are weighted. Sinks are added here and not in the parts, so that they count
once.

Dimension letters: N items; H query heads; U units; V width of a value; F the power of two not below it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.attention_tiles import LOWEST, with_sinks
from kernels.cuda.compile_spec import CompileSpec, Variant

# The number of parts that are combined at once.
CHUNK = 16


@triton.jit(do_not_specialize_on_alignment=["sinks"])
def combine_kernel(
    out,  # [N, H, V]
    partials,  # [U, H, V] float32
    partial_lse,  # [U, H] float32, base 2
    first_units,  # [N + 1]
    sinks,  # [H] float32, or None
    HEADS: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head of one item. Nothing is left to do for an item of one part."""
    line = tl.program_id(0).to(tl.int64)  # of [N, H]
    begin = tl.load(first_units + line // HEADS)
    count = tl.load(first_units + line // HEADS + 1) - begin
    first_line = begin.to(tl.int64) * HEADS + line % HEADS  # of [U, H]
    partial_lse += first_line
    partials += first_line * V
    columns = tl.arange(0, F)
    combined = tl.zeros([F], tl.float32)
    total = 0.0
    highest = LOWEST
    for first in range(0, tl.where(count > 1, count, 0), CHUNK):
        parts = first + tl.arange(0, CHUNK)  # [CHUNK]
        lse = tl.load(partial_lse + parts * HEADS, mask=parts < count, other=float("-inf"))
        written = (parts < count)[:, None] & (columns < V)[None, :]  # [CHUNK, F]
        values = tl.load(partials + parts[:, None] * (HEADS * V) + columns[None, :], mask=written, other=0.0)
        raised = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - raised)  # [CHUNK]
        correction = tl.exp2(highest - raised)
        combined = combined * correction + tl.sum(weights[:, None] * values, 0)
        total = total * correction + tl.sum(weights, 0)
        highest = raised
    total = with_sinks(total, highest, sinks, line % HEADS, True)
    combined = combined / tl.where(total > 0, total, 1.0)  # nothing was added up for an item of one part
    tl.store(out + line * V + columns, combined.to(out.dtype.element_ty), mask=(columns < V) & (count > 1))


@cache
def _variant(heads: int, width: int) -> Variant:
    constexprs = {"HEADS": heads, "V": width, "F": triton.next_power_of_2(width), "CHUNK": CHUNK}
    return Variant(combine_kernel, constexprs, num_warps=4, num_stages=1)


def combine_splits(
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    first_units: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Combine the parts. Checks nothing and mutates `out`, for items of several parts.

    Args:
        out: [N, H, V] contiguous; any float dtype.
        partials: [U, H, V] float32 contiguous. Each of several parts has keys.
        partial_lse: [U, H] float32 contiguous, logarithms to base 2.
        first_units: [N + 1] int32, as in `DecodePlan`.
        sinks: [H] float32 contiguous, natural logarithms; None: no sinks.
    """
    items, heads, width = out.shape
    _variant(heads, width).launch((items * heads,), out, partials, partial_lse, first_units, sinks)


def compile_specs() -> list[CompileSpec]:
    """Head widths that are powers of two and that are not, each dtype, and sinks."""
    shapes = [("bf16", 80, False), ("bf16", 128, False), ("bf16", 256, False), ("fp16", 128, False)]
    shapes += [("fp32", 128, False), ("bf16", 64, True)]
    return [_compile_spec(*shape) for shape in shapes]


def _compile_spec(dtype: str, width: int, sinks: bool) -> CompileSpec:
    types = {
        "out": f"*{dtype}",
        "partials": "*fp32",
        "partial_lse": "*fp32",
        "first_units": "*i32",
        "sinks": "*fp32" if sinks else None,
    }
    return CompileSpec(
        _variant(32, width),
        f"combine_splits {dtype} V={width}{' sinks' if sinks else ''}",
        types,
        divisible_by_16=("out", "partials", "partial_lse", "first_units"),
    )
