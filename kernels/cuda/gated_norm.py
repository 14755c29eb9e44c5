"""The gate of a recurrent layer and the RMSNorm before or after it, of groups of elements of a row.

A program computes one group of one row. Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T rows; I width of a row; W width of a group; E the power of two not below W.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant

# Elements of a program without a norm, and of a thread.
BLOCK = 1024
THREAD_ELEMENTS = 16


@triton.jit
def gated_norm_kernel(
    out,  # [T, I] contiguous, written
    x,  # [T, I] float32 contiguous
    gates,  # [T, I]
    weight,  # [I], or [W] of each group; not read without a norm
    gate_stride,
    eps,
    NORM: tl.constexpr,  # "after" or "before" the gate; "": there is none
    SIGMOID: tl.constexpr,  # the gate is a sigmoid, not silu
    SHARED: tl.constexpr,  # all groups have the same weight
    WIDTH: tl.constexpr,  # I
    W: tl.constexpr,
    E: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One group of one row."""
    wait(EARLY)
    groups: tl.constexpr = (WIDTH + W - 1) // W
    row = (tl.program_id(0) // groups).to(tl.int64)
    within = tl.arange(0, E)  # [E]
    column = tl.program_id(0) % groups * W + within
    mask = (within < W) & (column < WIDTH)
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0)
    gate = tl.load(gates + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if not SIGMOID:
        opened *= gate
    if NORM != "before":
        value *= opened
    if NORM != "":
        scale = tl.load(weight + (within if SHARED else column), mask=mask, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / W + eps) * scale
    if NORM == "before":
        value *= opened
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


@cache
def _variant(width: int, group: int, norm: str, *, is_sigmoid: bool, is_shared: bool) -> Variant:
    padded = triton.next_power_of_2(group)
    constexprs = {
        "NORM": norm,
        "SIGMOID": is_sigmoid,
        "SHARED": is_shared,
        "WIDTH": width,
        "W": group,
        "E": padded,
    }
    num_warps = min(16, max(1, padded // (32 * THREAD_ELEMENTS)))
    return Variant(gated_norm_kernel, constexprs, num_warps=num_warps, num_stages=1, early=True)


def gated_norm(
    x: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor | None,
    group: int,
    eps: float,
    *,
    norm_first: bool = False,
    is_sigmoid: bool = False,
) -> torch.Tensor:
    """norm(x * silu(gates)), or norm(x) * silu(gates), by groups; see `gated_norm_kernel`. Checks nothing.

    Args:
        x: [T, I] float32 contiguous.
        gates: [T, I], adjacent in a row.
        weight: Of the norm: [I], or [W] of each group. None: there is no norm.
        group: W.
        eps: Of the norm.
        norm_first: The norm is before the gate.
        is_sigmoid: The gate is sigmoid(gates).

    Returns:
        [T, I] in the dtype of the gates
    """
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=gates.dtype, device=x.device)
    if rows == 0:
        return out
    norm = "" if weight is None else "before" if norm_first else "after"
    group = group if weight is not None else BLOCK
    is_shared = weight is not None and len(weight) < width
    variant = _variant(width, group, norm, is_sigmoid=is_sigmoid, is_shared=is_shared)
    grid = (rows * triton.cdiv(width, group),)
    variant.launch(grid, out, x, gates, x if weight is None else weight, gates.stride(0), eps)
    return out
