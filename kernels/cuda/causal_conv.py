"""Convolutions over the last tokens of each channel, as `kernels.short_conv` has them.

A program computes B channels of one row, and keeps the state after it. Launches begin early
(`kernels.cuda.dependent_launch`).

Dimension letters: T rows; C channels; L taps; B channels of a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.gated_activation import activated
from kernels.cuda.variant import Variant
from kernels.state_rows import StateRows

BLOCK = 512


# A batch has its indices one after the other: their addresses may not compile another variant.
@triton.jit(do_not_specialize_on_alignment=["begins", "sources", "keeps"])
def causal_conv_kernel(
    out,  # [T, C] contiguous, written
    raw,  # [T, C]; [T, 3 * C] if GATED: gates of inputs, gates of outputs, inputs
    taps,  # [L, C]
    bias,  # [C]; not read without BIAS
    states,  # [slots, L - 1, C], written
    begins,  # [T], as of `StateRows`
    sources,  # [T]
    keeps,  # [T]
    raw_stride,
    C: tl.constexpr,
    L: tl.constexpr,
    B: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """B channels of one row."""
    wait(EARLY)
    # The programs of a row have consecutive numbers. With one dimension, the grid has no limit on T.
    blocks: tl.constexpr = (C + B - 1) // B
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * B + tl.arange(0, B)  # [B]
    inside = channel < C
    begin = tl.load(begins + row).to(tl.int64)
    source = tl.load(sources + row).to(tl.int64)
    kept = tl.load(keeps + row).to(tl.int64)
    total = tl.zeros([B], tl.float32)
    for tap in tl.static_range(L):
        place = row - (L - 1 - tap)
        in_batch = inside & (place >= begin)
        value = tl.load(raw + place * raw_stride + channel, mask=in_batch, other=0.0)
        if GATED:
            given = tl.load(raw + place * raw_stride + 2 * C + channel, mask=in_batch, other=0.0)
            value = (value.to(tl.float32) * given.to(tl.float32)).to(given.dtype)
        # The state has the L - 1 inputs before the item.
        before = states + (source * (L - 1) + (L - 1) + place - begin) * C + channel
        in_state = inside & (place < begin) & (source >= 0)
        value = tl.where(place >= begin, value, tl.load(before, mask=in_state, other=0.0))
        if tap > 0:
            tl.store(states + (kept * (L - 1) + tap - 1) * C + channel, value, mask=inside & (kept >= 0))
        weight = tl.load(taps + tap * C + channel, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight.to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    if GATED:
        gate = tl.load(raw + row * raw_stride + C + channel, mask=inside, other=0.0)
        result = gate.to(tl.float32) * rounded
    else:
        result = activated(rounded, "silu")
    tl.store(out + row * C + channel, result.to(out.dtype.element_ty), mask=inside)


@cache
def _variant(width: int, length: int, *, has_bias: bool, is_gated: bool) -> Variant:
    constexprs = {"C": width, "L": length, "B": BLOCK, "BIAS": has_bias, "GATED": is_gated}
    return Variant(causal_conv_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def causal_conv(
    raw: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    at: StateRows,
    *,
    is_gated: bool,
) -> torch.Tensor:
    """Launch `causal_conv_kernel`; see `short_conv` and, if it is not gated, `silu_conv`. Checks nothing.

    Mutates `states`. The elements of a row of `raw` are adjacent.
    """
    length, width = taps.shape
    out = torch.empty(len(raw), width, dtype=raw.dtype, device=raw.device)
    if len(raw) == 0:
        return out
    _variant(width, length, has_bias=bias is not None, is_gated=is_gated).launch(
        (len(raw) * triton.cdiv(width, BLOCK),),
        out,
        raw,
        taps,
        taps if bias is None else bias,
        states,
        at.begins,
        at.sources,
        at.keeps,
        raw.stride(0),
    )
    return out
