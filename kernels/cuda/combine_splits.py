"""Combines the partial results of the splits of decode attention.

A partial result is the weighted average of the values of a split, and the base-2 logarithm of the sum of its
weights, by which the averages are weighted. Sinks are added here and not in the splits, so that they count
once.

Dimension letters: N items; H query heads; C splits; V width of a value; F the power of two not below it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.attention_tiles import LOWEST, with_sinks
from kernels.cuda.compile_spec import CompileSpec, Variant

# The number of splits that are combined at once.
CHUNK = 16


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks"])
def combine_kernel(
    out,  # [N, H, V]
    partials,  # [N, H, C, V] float32
    partial_lse,  # [N, H, C] float32, base 2; -inf: a split without keys, whose partial is not written
    sinks,  # [H] float32, or None
    num_splits,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head of one item."""
    line = tl.program_id(0).to(tl.int64)  # of [N, H]
    columns = tl.arange(0, F)
    combined = tl.zeros([F], tl.float32)
    total = 0.0
    highest = LOWEST
    for first in range(0, num_splits, CHUNK):
        splits = first + tl.arange(0, CHUNK)  # [CHUNK]
        parts = line * num_splits + splits
        lse = tl.load(partial_lse + parts, mask=splits < num_splits, other=float("-inf"))
        written = (lse > float("-inf"))[:, None] & (columns < V)[None, :]  # [CHUNK, F]
        values = tl.load(partials + parts[:, None] * V + columns[None, :], mask=written, other=0.0)
        raised = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - raised)  # [CHUNK]
        correction = tl.exp2(highest - raised)
        combined = combined * correction + tl.sum(weights[:, None] * values, 0)
        total = total * correction + tl.sum(weights, 0)
        highest = raised
    total = with_sinks(total, highest, sinks, line % HEADS, True)
    combined = combined / tl.where(total > 0, total, 1.0)  # zeros for a padding item, which has no keys
    tl.store(out + line * V + columns, combined.to(out.dtype.element_ty), mask=columns < V)


@cache
def _variant(heads: int, width: int) -> Variant:
    constexprs = {"HEADS": heads, "V": width, "F": triton.next_power_of_2(width), "CHUNK": CHUNK}
    return Variant(combine_kernel, constexprs, num_warps=4, num_stages=1)


def combine_splits(
    out: torch.Tensor,
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Combine the splits. Checks nothing and mutates `out`.

    Args:
        out: [N, H, V] contiguous; any float dtype. Zeros where no split has keys.
        partials: [N, H, C, V] float32 contiguous; not read where `partial_lse` is -inf.
        partial_lse: [N, H, C] float32 contiguous, logarithms to base 2.
        sinks: [H] float32 contiguous, natural logarithms; None: no sinks.
    """
    items, heads, num_splits, width = partials.shape
    variant = _variant(heads, width)
    variant.launch((items * heads,), out, partials, partial_lse, sinks, num_splits)


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
        "sinks": "*fp32" if sinks else None,
        "num_splits": "i32",
    }
    return CompileSpec(
        _variant(32, width),
        f"combine_splits {dtype} V={width}{' sinks' if sinks else ''}",
        types,
        divisible_by_16=("out", "partials", "partial_lse"),
    )
