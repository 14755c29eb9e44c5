"""Products of each head with a matrix of its own, with the tiles of `kernels.cuda.linear`.

A dtype has one tile for any number of rows, and inputs are not divided, so the bits of a row do not depend on
the others.

Dimension letters: T rows; H heads; I inputs; O outputs; M rows, N outputs and K inputs of a tile.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import fetch_rows, wait
from kernels.cuda.linear import TILES_AHEAD, sum_of_part, tile_for
from kernels.cuda.variant import Variant


# The number of rows may not compile another variant, whose bits might differ.
@triton.jit(do_not_specialize=["num_rows"])
def head_products_kernel(
    out,  # [T, H, O], written
    x,  # [T, H, I]
    weights,  # [H, O, I] contiguous
    num_rows,  # T
    OUT_ROW: tl.constexpr,  # strides
    OUT_HEAD: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """M rows and N outputs of one head."""
    head = tl.program_id(1).to(tl.int64)
    # The programs of the same outputs have consecutive numbers, since they read the same weights.
    blocks = tl.cdiv(num_rows, M)
    row = (tl.program_id(0) % blocks * M + tl.arange(0, M)).to(tl.int64)[:, None]  # [M, 1]
    output = (tl.program_id(0) // blocks * N + tl.arange(0, N)).to(tl.int64)  # [N]
    weight = weights + head * (OUTPUTS * INPUTS)
    if EARLY:
        fetch_rows(weight, output, OUTPUTS - 1, INPUTS, 0, TILES_AHEAD * K)
    wait(EARLY)
    x_head = x + head * X_HEAD
    total = sum_of_part(x_head, weight, row, output, num_rows, 0, OUTPUTS, INPUTS, INPUTS, X_ROW, M, N, K)
    mask = (row < num_rows) & (output < OUTPUTS)[None, :]
    to = out + head * OUT_HEAD + row * OUT_ROW + output[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@cache
def _variant(
    dtype: torch.dtype, outputs: int, inputs: int, out: tuple[int, int], x: tuple[int, int]
) -> Variant:
    constexprs = {"OUT_ROW": out[0], "OUT_HEAD": out[1], "X_ROW": x[0], "X_HEAD": x[1]}
    constexprs |= {"OUTPUTS": outputs, "INPUTS": inputs} | dict(zip("MNK", tile_for(dtype), strict=True))
    return Variant(head_products_kernel, constexprs, num_warps=4, num_stages=3, early=True)


def head_products(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Launch; see `kernels.head_products.head_products`. Arguments are checked."""
    heads, outputs, inputs = weights.shape
    if not len(x):
        return
    rows, columns, _ = tile_for(x.dtype)
    programs = triton.cdiv(len(x), rows) * triton.cdiv(outputs, columns)
    variant = _variant(x.dtype, outputs, inputs, out.stride()[:2], x.stride()[:2])
    variant.launch((programs, heads), out, x, weights, len(x))
