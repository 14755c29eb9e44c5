"""RMSNorm and residual add with RMSNorm, with the roundings of `kernels.rms_norm`.

A program normalises R rows in one pass: each is read once, kept in registers and written once. Launches begin
early (`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; H heads (1 where x has two dimensions); D normalised width; E the next power of
two; R rows of a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant

# Elements of a program where rows are short, and of a thread: two loads of 16 bytes in half precision.
BLOCK_ELEMENTS = 1024
THREAD_ELEMENTS = 16


@triton.jit
def normalised(x, weight, eps, D: tl.constexpr):
    """RMSNorm of rows [R, E]: rounded to the dtype of the weight before it is applied, to that of x after."""
    wide = x.to(tl.float32)
    variance = tl.sum(wide * wide, 1) / D  # [R]; what lies beyond D is zero
    unit = (wide * tl.rsqrt(variance + eps)[:, None]).to(weight.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    out,  # [T, H, D] contiguous
    x,  # [T, H, D]
    weight,  # [D], or [H, D] with WEIGHT_STRIDE = D
    rows,  # T * H
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows R * program .. R * (program + 1) - 1."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    column = tl.arange(0, E)[None, :]  # [1, E]
    mask = (row < rows)[:, None] & (column < D)  # [R, E]
    token, head = row // HEADS, row % HEADS
    values = tl.load(x + (token * token_stride + head * head_stride)[:, None] + column, mask=mask, other=0.0)
    scale = tl.load(weight + (head * WEIGHT_STRIDE)[:, None] + column, mask=mask, other=0.0)
    tl.store(out + (row * D)[:, None] + column, normalised(values, scale, eps, D), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    out,  # [T, D] contiguous
    x,  # [T, D]
    residual,  # [T, D], mutated
    weight,  # [D]
    x_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, E)[None, :]  # [1, E]
    mask = column < D
    added = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    before = tl.load(residual + row * residual_stride + column, mask=mask, other=0.0)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    # The sum is rounded before it is normalised, as the residual stream that others read.
    total = (added.to(tl.float32) + before.to(tl.float32)).to(added.dtype)
    tl.store(residual + row * residual_stride + column, total, mask=mask)
    tl.store(out + row * D + column, normalised(total, scale, eps, D), mask=mask)


def _tile(width: int) -> tuple[int, int, int]:
    """E, R and the warps of a program."""
    padded = triton.next_power_of_2(width)
    rows = max(1, BLOCK_ELEMENTS // padded)
    return padded, rows, min(16, max(1, rows * padded // (32 * THREAD_ELEMENTS)))


@cache
def _norm(heads: int, width: int, weight_stride: int) -> Variant:
    padded, rows, num_warps = _tile(width)
    constexprs = {"HEADS": heads, "D": width, "E": padded, "R": rows, "WEIGHT_STRIDE": weight_stride}
    return Variant(rms_norm_kernel, constexprs, num_warps=num_warps, num_stages=1, early=True)


@cache
def _add_norm(width: int) -> Variant:
    padded, _, num_warps = _tile(width)
    return Variant(
        add_rms_norm_kernel, {"D": width, "E": padded}, num_warps=num_warps, num_stages=1, early=True
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch `rms_norm_kernel`; see `kernels.rms_norm.rms_norm`. Arguments are checked."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    heads, width = (1 if x.dim() == 2 else x.shape[1]), x.shape[-1]
    variant = _norm(heads, width, weight.stride(0) if weight.dim() == 2 else 0)
    variant.launch(
        (triton.cdiv(len(x) * heads, variant.constexprs["R"]),),
        out,
        x,
        weight,
        len(x) * heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
    )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch `add_rms_norm_kernel`; see `kernels.rms_norm.add_rms_norm`. Arguments are checked.

    Mutates `residual`.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    _add_norm(x.shape[1]).launch((len(x),), out, x, residual, weight, x.stride(0), residual.stride(0), eps)
    return out
