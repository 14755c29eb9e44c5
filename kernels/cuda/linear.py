"""Projections x W^T + b on a GPU, in which the bits of a row do not depend on the number of rows.

cuBLAS, which computes the other projections, chooses tiles and the parts of a sum by the number of rows. Here
a dtype has one configuration for any number of rows, and a program sums over all inputs in order.

Compiled for sm_90 with Triton 3.7.1, bfloat16 needs 118 registers and 96 KiB of shared memory, with 4 buffers
for each operand; wgmma is used, and nothing spills. The tiles are those of `kernels.cuda.experts` for many
pairs, and were not tuned on a GPU.

Dimension letters: T rows; I inputs; O outputs; M rows, N outputs and K inputs of a tile.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.compile_spec import DTYPES, CompileSpec, Expectations, Variant


# The number of rows may not compile another variant, whose bits might differ.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out,  # [T, OUTPUTS] contiguous, written
    x,  # [T, INPUTS] contiguous
    weight,  # [OUTPUTS, INPUTS] contiguous
    bias,  # [OUTPUTS], or None
    num_rows,  # T
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """M rows and N outputs."""
    # The programs of the same outputs have consecutive numbers, since the weight is larger than x.
    blocks = tl.cdiv(num_rows, M)
    row = (tl.program_id(0) % blocks * M + tl.arange(0, M)).to(tl.int64)[:, None]  # [M, 1]
    output = (tl.program_id(0) // blocks * N + tl.arange(0, N)).to(tl.int64)  # [N]
    is_row, is_output = row < num_rows, output < OUTPUTS
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, INPUTS, K):
        column = start + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < INPUTS
        rows = tl.load(x + row * INPUTS + column, mask=is_row & is_input, other=0.0)  # [M, K]
        matrix = tl.load(
            weight + output[:, None] * INPUTS + column, mask=is_output[:, None] & is_input, other=0.0
        )  # [N, K]
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    written = out + row * OUTPUTS + output[None, :]
    tl.store(written, total.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@cache
def _variant(dtype: torch.dtype, outputs: int, inputs: int) -> Variant:
    # float32 is computed without tensor cores, which do not have its precision.
    tile = (64, 64, 32) if dtype is torch.float32 else (64, 128, 64)
    constexprs = {"OUTPUTS": outputs, "INPUTS": inputs} | dict(zip("MNK", tile, strict=True))
    return Variant(linear_kernel, constexprs, num_warps=4, num_stages=3 if dtype is torch.float32 else 4)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel; see `kernels.linear.linear`. x is checked and has rows, the weight is contiguous."""
    outputs, inputs = weight.shape
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    variant = _variant(x.dtype, outputs, inputs)
    blocks = triton.cdiv(len(x), variant.constexprs["M"])
    grid = (blocks * triton.cdiv(outputs, variant.constexprs["N"]),)
    variant.launch(grid, out, x.contiguous(), weight, bias, len(x))
    return out


def compile_specs() -> list[CompileSpec]:
    """Projections and the head of Qwen3-0.6B and 8B, other dtypes, a bias, and widths that fill no tile."""
    shapes = [("bf16", 4096, 1024, False), ("bf16", 151_936, 4096, False), ("bf16", 3584, 3584, True)]
    shapes += [("bf16", 1100, 1000, True), ("fp16", 4096, 1024, False), ("fp32", 4096, 1024, True)]
    return [_compile_spec(*shape) for shape in shapes]


def _compile_spec(dtype: str, outputs: int, inputs: int, biased: bool) -> CompileSpec:
    pointers = ("out", "x", "weight", *(("bias",) if biased else ()))
    types = dict.fromkeys(("out", "x", "weight"), f"*{dtype}")
    return CompileSpec(
        _variant(DTYPES[dtype], outputs, inputs),
        f"linear {dtype} {outputs}x{inputs}{' bias' if biased else ''}",
        types | {"bias": f"*{dtype}" if biased else None, "num_rows": "i32"},
        divisible_by_16=pointers,
        expects=Expectations(wgmma=dtype != "fp32", kv_buffers=2),
    )
