"""The gate of a feed-forward block, with the roundings of `kernels.gated_activation`.

Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; I intermediate width; B columns of a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant

# The number of columns of a program: in half precision, each thread loads 16 bytes from each half.
BLOCK = 1024
# For clamped_swiglu, as in `kernels.gated_activation`.
SIGMOID_GAIN = tl.constexpr(1.702)
GATE_LIMIT = tl.constexpr(7.0)


@triton.jit
def gelu(x):
    """The product x * (normal distribution function at x), in float32.

    At -|x| the function is exp(-x^2 / 2) * t * P(t) with t = 1 / (1 + |x| / sqrt(8)). The polynomial P was
    fitted to erfc. 1 - erf would lose the precision of small results.
    """
    t = 1.0 / (1.0 + tl.abs(x) * 0.35355339)
    p = -0.0296932822 * t + 0.143062221
    p = p * t - 0.245203647
    p = p * t + 0.140867129
    p = p * t - 0.0145745712
    p = p * t + 0.101876379
    p = p * t + 0.121417532
    p = p * t + 0.141206052
    p = p * t + 0.141042166
    below = tl.exp(-0.5 * x * x) * (t * p)
    return x * tl.where(x >= 0.0, 1.0 - below, below)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of float32 values."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the sigmoid of 2 y, which is precise where the tangent is almost -1.
        result = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    else:
        result = gelu(x)
    return result


@triton.jit
def clamped_swiglu(gate, up):
    """Float32 values, of which the first is rounded before the product. Comparisons keep NaN."""
    limited = tl.where(gate > GATE_LIMIT, GATE_LIMIT, gate)
    below = tl.where(up > GATE_LIMIT, GATE_LIMIT, up)
    opened = limited / (1.0 + tl.exp(limited * -SIGMOID_GAIN))
    return opened, tl.where(below < -GATE_LIMIT, -GATE_LIMIT, below) + 1.0


@triton.jit
def gated_activation_kernel(
    out,  # [T, I] contiguous
    gate_up,  # [T, 2 * I]
    row_stride,
    WIDTH: tl.constexpr,  # I
    B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """B columns of one row."""
    wait(EARLY)
    # The programs of a row have consecutive numbers. With one dimension, the grid has no limit on T.
    blocks: tl.constexpr = (WIDTH + B - 1) // B
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * B + tl.arange(0, B)  # [B]
    mask = column < WIDTH
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + WIDTH + column, mask=mask, other=0.0)
    factor = up.to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        opened, factor = clamped_swiglu(gate.to(tl.float32), factor)
    else:
        opened = activated(gate.to(tl.float32), ACTIVATION)
    # Rounded before the product, as the unfused model does.
    product = opened.to(gate.dtype).to(tl.float32) * factor
    tl.store(out + row * WIDTH + column, product.to(gate.dtype), mask=mask)


@cache
def _variant(width: int, activation: str) -> Variant:
    constexprs = {"WIDTH": width, "B": BLOCK, "ACTIVATION": activation}
    return Variant(gated_activation_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch `gated_activation_kernel`; see `kernels.gated_activation`. The arguments are checked."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    variant = _variant(width, activation)
    variant.launch((tokens * triton.cdiv(width, BLOCK),), out, gate_up, gate_up.stride(0))
    return out
