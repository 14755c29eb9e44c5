"""The gate of a SwiGLU block, with the roundings of `kernels.silu_mul`.

Dimension letters: T tokens; I intermediate width; B columns of a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.compile_spec import CompileSpec, Variant

# Columns of a program: one load of 16 bytes a thread, from each half, in half precision.
BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    out,  # [T, I] contiguous
    gate_up,  # [T, 2 * I]
    row_stride,
    WIDTH: tl.constexpr,  # I
    B: tl.constexpr,
):
    """B columns of one row."""
    # Programs of a row follow one another; a grid of one dimension has no limit on T.
    blocks: tl.constexpr = (WIDTH + B - 1) // B
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * B + tl.arange(0, B)  # [B]
    mask = column < WIDTH
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + WIDTH + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before the product, as the unfused model does.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(gate.dtype), mask=mask)


@cache
def _variant(width: int) -> Variant:
    return Variant(silu_mul_kernel, {"WIDTH": width, "B": BLOCK}, num_warps=4, num_stages=1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Launch `silu_mul_kernel`; see `kernels.silu_mul.silu_mul`. The argument is checked."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    _variant(width).launch((tokens * triton.cdiv(width, BLOCK),), out, gate_up, gate_up.stride(0))
    return out


def compile_specs() -> list[CompileSpec]:
    """Widths with and without a last block that is cut off."""
    return [
        CompileSpec(
            _variant(width),
            f"silu_mul {dtype} I={width}",
            {"out": f"*{dtype}", "gate_up": f"*{dtype}", "row_stride": "i32"},
            divisible_by_16=("out", "gate_up", "row_stride"),
        )
        for dtype, width in (("bf16", 3072), ("bf16", 8960), ("fp16", 3072), ("fp32", 3072))
    ]
