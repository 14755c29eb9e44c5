"""Projections x W^T + b on a GPU, in which the bits of a row do not depend on the number of rows.

cuBLAS, which computes the other projections, chooses tiles and the parts of a sum by the number of rows. Here
a dtype has one tile for any number of rows, and a weight has one number of parts of its inputs. A part is
summed from zero, and the parts are added in order.

Who adds them does depend on the number of rows, but no bit does. With many rows a program sums all parts of
its outputs, one after the other. With few rows those programs would be too few to read the weight. So each
sums one part and writes its sums to memory, and another launch adds them. Launches begin early
(`kernels.cuda.dependent_launch`).

Compiled for sm_90 with Triton 3.7.1, bfloat16 needs up to 124 registers and 96 KiB of shared memory, with 4
buffers for each operand; wgmma is used, and nothing spills. The tiles are those of `kernels.cuda.experts` for
many pairs, and were not tuned on a GPU.

Dimension letters: T rows; I inputs; O outputs; S parts of the inputs; M rows, N outputs and K inputs of a
tile; B elements of a program.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import fetch_rows, wait
from kernels.cuda.variant import Variant

# The programs of a launch that read a weight at about the full bandwidth: one for each multiprocessor.
PROGRAMS = 128
# Tiles of a part of the inputs, at least: with fewer, starting it would take most of the time.
MIN_PART_TILES = 4
# Tiles of the weight that a program fetches before it waits.
TILES_AHEAD = tl.constexpr(4)
# Elements of a program that adds up parts.
BLOCK = 1024


@triton.jit
def sum_of_part(
    x,
    weight,
    row,  # [M, 1]
    output,  # [N]
    num_rows,
    part,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LENGTH: tl.constexpr,  # of a part
    X_ROW: tl.constexpr,  # the stride of rows of x
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """The products of M rows and N outputs, over one part of the inputs: [M, N] float32."""
    is_row, is_output = row < num_rows, output < OUTPUTS
    first = part * LENGTH
    total = tl.zeros([M, N], tl.float32)
    for step in range(tl.cdiv(tl.minimum(LENGTH, INPUTS - first), K)):
        column = first + step * K + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < INPUTS
        rows = tl.load(x + row * X_ROW + column, mask=is_row & is_input, other=0.0)  # [M, K]
        matrix = tl.load(
            weight + output[:, None] * INPUTS + column, mask=is_output[:, None] & is_input, other=0.0
        )  # [N, K]
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
    return total


# The number of rows may not compile another variant, whose bits might differ.
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out,  # [T, OUTPUTS] contiguous, written; or with ONE_PART [S, T, OUTPUTS] float32
    x,  # [T, INPUTS] contiguous
    weight,  # [OUTPUTS, INPUTS] contiguous
    bias,  # [OUTPUTS], or None; not read with ONE_PART
    num_rows,  # T
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,  # S
    ONE_PART: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """M rows and N outputs, with all parts of the inputs or with one."""
    length: tl.constexpr = (INPUTS + SPLITS * K - 1) // (SPLITS * K) * K
    # The programs of the same outputs have consecutive numbers, since the weight is larger than x.
    blocks = tl.cdiv(num_rows, M)
    row = (tl.program_id(0) % blocks * M + tl.arange(0, M)).to(tl.int64)[:, None]  # [M, 1]
    output = (tl.program_id(0) // blocks * N + tl.arange(0, N)).to(tl.int64)  # [N]
    part = tl.program_id(1)
    if EARLY:
        fetch_rows(weight, output, OUTPUTS - 1, INPUTS, part * length, TILES_AHEAD * K)
    wait(EARLY)
    total = sum_of_part(x, weight, row, output, num_rows, part, OUTPUTS, INPUTS, length, INPUTS, M, N, K)
    mask = (row < num_rows) & (output < OUTPUTS)[None, :]
    if ONE_PART:
        tl.store(out + (part * num_rows + row) * OUTPUTS + output[None, :], total, mask=mask)
    else:
        for later in range(1, SPLITS):
            total += sum_of_part(
                x, weight, row, output, num_rows, later, OUTPUTS, INPUTS, length, INPUTS, M, N, K
            )
        if bias is not None:
            total += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row * OUTPUTS + output[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    out,  # [T, OUTPUTS] contiguous, written
    sums,  # [S, T, OUTPUTS] float32
    bias,  # [OUTPUTS], or None
    num_rows,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """B elements, of any rows."""
    wait(EARLY)
    size = num_rows.to(tl.int64) * OUTPUTS
    element = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = element < size
    total = tl.load(sums + element, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(sums + part * size + element, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + element % OUTPUTS, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


def tile_for(dtype: torch.dtype) -> tuple[int, int, int]:
    """M, N and K."""
    # float32 is computed without tensor cores, which do not have its precision.
    return (64, 64, 32) if dtype is torch.float32 else (64, 128, 64)


def splits_for(dtype: torch.dtype, outputs: int, inputs: int) -> int:
    """The number of parts of the inputs: enough programs for few rows. Not by the number of rows."""
    _, outputs_a_tile, inputs_a_tile = tile_for(dtype)
    wanted = -(-PROGRAMS // -(-outputs // outputs_a_tile))
    return max(1, min(wanted, -(-inputs // inputs_a_tile) // MIN_PART_TILES))


@cache
def _variant(dtype: torch.dtype, outputs: int, inputs: int, *, one_part: bool) -> Variant:
    constexprs = {"OUTPUTS": outputs, "INPUTS": inputs} | dict(zip("MNK", tile_for(dtype), strict=True))
    splits = splits_for(dtype, outputs, inputs)
    constexprs |= {"SPLITS": splits, "ONE_PART": one_part}
    # The program that adds the parts has two tiles of sums, which would spill with 4 warps before sm_90.
    num_warps, num_stages = 4 if splits == 1 else 8, 3 if dtype is torch.float32 else 4
    return Variant(linear_kernel, constexprs, num_warps, num_stages, early=True)


@cache
def _add(outputs: int, splits: int) -> Variant:
    constexprs = {"OUTPUTS": outputs, "SPLITS": splits, "B": BLOCK}
    return Variant(add_parts_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Launch; see `kernels.linear.linear`. x is checked and has rows, the weight is contiguous."""
    outputs, inputs = weight.shape
    rows, splits = len(x), splits_for(x.dtype, outputs, inputs)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    rows_a_tile, outputs_a_tile, _ = tile_for(x.dtype)
    programs = triton.cdiv(rows, rows_a_tile) * triton.cdiv(outputs, outputs_a_tile)
    # With half of the multiprocessors busy, to write and read sums would cost more than it gains.
    one_part = splits > 1 and 2 * programs < PROGRAMS
    written = x.new_empty(splits, rows, outputs, dtype=torch.float32) if one_part else out
    _variant(x.dtype, outputs, inputs, one_part=one_part).launch(
        (programs, splits if one_part else 1), written, x.contiguous(), weight, bias, rows
    )
    if one_part:
        _add(outputs, splits).launch((triton.cdiv(rows * outputs, BLOCK),), out, written, bias, rows)
    return out
