"""Adds up what the splits of decode attention made of their keys.

A split hands over the average of its values and the base-2 logarithm of the sum of its weights, which is what
that average counts in the whole.

Dimension letters: N items; H query heads; C splits; D head width; E the power of two not below it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.attention_tiles import LOWEST
from kernels.cuda.compile_spec import CompileSpec, Variant

# Splits that are added up at once.
CHUNK = 16


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out,  # [N, H, D]
    partials,  # [N, H, C, D] float32
    partial_lse,  # [N, H, C] float32, base 2; -inf: a split without keys, whose partial is not written
    num_splits,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head of one item."""
    line = tl.program_id(0).to(tl.int64)  # of [N, H]
    columns = tl.arange(0, E)
    combined = tl.zeros([E], tl.float32)
    total = 0.0
    highest = LOWEST
    for first in range(0, num_splits, CHUNK):
        splits = first + tl.arange(0, CHUNK)  # [CHUNK]
        parts = line * num_splits + splits
        lse = tl.load(partial_lse + parts, mask=splits < num_splits, other=float("-inf"))
        written = (lse > float("-inf"))[:, None] & (columns < D)[None, :]  # [CHUNK, E]
        values = tl.load(partials + parts[:, None] * D + columns[None, :], mask=written, other=0.0)
        raised = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - raised)  # [CHUNK]
        correction = tl.exp2(highest - raised)
        combined = combined * correction + tl.sum(weights[:, None] * values, 0)
        total = total * correction + tl.sum(weights, 0)
        highest = raised
    combined = combined / tl.where(total > 0, total, 1.0)  # a padded item has no keys: zeros
    tl.store(out + line * D + columns, combined.to(out.dtype.element_ty), mask=columns < D)


@cache
def _variant(width: int) -> Variant:
    constexprs = {"D": width, "E": triton.next_power_of_2(width), "CHUNK": CHUNK}
    return Variant(combine_kernel, constexprs, num_warps=4, num_stages=1)


def combine_splits(out: torch.Tensor, partials: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """Add up the splits. Checks nothing and mutates `out`.

    Args:
        out: [N, H, D] contiguous; any float dtype. Zeros where no split has keys.
        partials: [N, H, C, D] float32 contiguous; not read where `partial_lse` is -inf.
        partial_lse: [N, H, C] float32 contiguous, logarithms to base 2.
    """
    items, heads, num_splits, width = partials.shape
    _variant(width).launch((items * heads,), out, partials, partial_lse, num_splits)


def compile_specs() -> list[CompileSpec]:
    """Head widths that are powers of two and that are not, and each dtype."""
    shapes = (("bf16", 80), ("bf16", 128), ("bf16", 256), ("fp16", 128), ("fp32", 128))
    return [
        CompileSpec(
            _variant(width),
            f"combine_splits {dtype} D={width}",
            {"out": f"*{dtype}", "partials": "*fp32", "partial_lse": "*fp32", "num_splits": "i32"},
            divisible_by_16=("out", "partials", "partial_lse"),
        )
        for dtype, width in shapes
    ]
