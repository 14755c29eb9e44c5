"""Products of up to 16 rows on a GPU, with the norm before them and the gate or the residual after them.

A decode step reads each weight once, for few rows. What surrounds a product is then as long as the launch of
it, so it is part of the product: `kernels.few_rows` has the formulas and the roundings.

The norm of a row needs the sum of its squares before its first product. The product that has written the row
has left it in parts, one for each of its tiles, and they are added up in order. So no program reads a whole
row before it begins.

With SPLITS > 1 each program sums over a part of the inputs, and writes its sums to memory. Another launch
adds them up in the order of the parts, and does what comes after the product. There are no atomics: the bits
of a result depend on the tiles, and not on which program ends first.

Launches begin early (`kernels.cuda.dependent_launch`). What they multiply is not known by then, but their
weights are: each program fetches the first of them into the L2 cache before it waits.

Dimension letters: T rows, at most M; I inputs; O outputs; S parts of the inputs; M rows, N outputs and K
inputs of a tile; B columns of a program; P parts of a sum of squares.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import fetch_rows, wait
from kernels.cuda.gated_activation import activated
from kernels.cuda.variant import Variant
from kernels.few_rows_tiles import MOST_ROWS, Tiles

# Columns of a program that adds up the sums of the parts of the inputs.
BLOCK = 64
# Parts of a sum of squares that are read at a time.
PARTS = 128
# Tiles of the weight that a program fetches before it waits: about as many as its loop loads ahead.
TILES_AHEAD = tl.constexpr(4)


@triton.jit
def row_scales(squares, parts, width, eps, M: tl.constexpr, PARTS: tl.constexpr):
    """[M] the factor of each row in RMSNorm, from the partial sums [parts, M] of its squares."""
    total = tl.zeros([PARTS, M], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        total += tl.load(squares + part * M + tl.arange(0, M)[None, :], mask=part < parts, other=0.0)
    return tl.rsqrt(tl.sum(total, 0) / width + eps)


@triton.jit
def rounded(total, bias, output, is_output, like):
    """Sums [M, N] with the bias, in the dtype of `like`."""
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return total.to(like.dtype.element_ty)


@triton.jit
def finish(
    total,  # [M, N] float32
    other,  # [M, N] float32, of up; or None
    out,
    squares_out,
    bias,
    tile,
    output,  # [N]
    num_rows,
    outputs,
    out_stride,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    M: tl.constexpr,
):
    """Do what comes after the product, for the outputs of one tile, and write it."""
    row = tl.arange(0, M)
    is_output = output < outputs
    mask = (row < num_rows)[:, None] & is_output[None, :]
    value = rounded(total, bias, output, is_output, out)
    if ACTIVATION is not None:
        up = rounded(other, bias, outputs + output, output < outputs, out)
        gate = activated(value.to(tl.float32), ACTIVATION).to(value.dtype)
        value = (gate.to(tl.float32) * up.to(tl.float32)).to(value.dtype)
    written = out + row.to(tl.int64)[:, None] * out_stride + output[None, :]
    if RESIDUAL:
        before = tl.load(written, mask=mask, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        wide = tl.where(mask, value.to(tl.float32), 0.0)
        tl.store(squares_out + tile * M + row, tl.sum(wide * wide, 1))
    tl.store(written, value, mask=mask)


# The number of rows may not compile another variant: none may be compiled after the first steps.
@triton.jit(do_not_specialize=["num_rows", "parts"])
def product_kernel(
    out,  # [T, O], written; with RESIDUAL the residual stream, mutated
    sums,  # [S, T, O] float32, written, with 2 * O for O with a gate; or None: S is 1
    squares_out,  # [tiles, M] float32, written with RESIDUAL, if S is 1
    x,  # [T, I]
    weight,  # [O, I] contiguous; with a gate [2 * O, I]
    bias,  # [O] or [2 * O], or None
    norm_weight,  # [I], or None: x is not normalised
    squares,  # [parts, M] float32, of x
    num_rows,  # T
    outputs,  # O
    inputs,  # I
    parts,
    x_stride,
    out_stride,
    eps,
    ACTIVATION: tl.constexpr,  # or None: there is no gate
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """N outputs of all rows, or one part of their sums."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * N + tl.arange(0, N)  # [N]
    length = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    first = split * length
    if EARLY:
        fetch_rows(weight, output, outputs - 1, inputs, first, TILES_AHEAD * K)
        if ACTIVATION is not None:
            fetch_rows(weight, output + outputs, 2 * outputs - 1, inputs, first, TILES_AHEAD * K)
    wait(EARLY)
    row = tl.arange(0, M).to(tl.int64)[:, None]  # [M, 1]
    is_row, is_output = row < num_rows, (output < outputs)[:, None]
    weight_rows = weight + output.to(tl.int64)[:, None] * inputs  # [N, 1]
    up_rows = weight + (output + outputs).to(tl.int64)[:, None] * inputs
    scales = None
    if norm_weight is not None:
        scales = row_scales(squares, parts, inputs, eps, M, PARTS)[:, None]  # [M, 1]
    total = tl.zeros([M, N], tl.float32)
    other = tl.zeros([M, N], tl.float32) if ACTIVATION is not None else None
    end = tl.minimum(first + length, inputs)
    # Where a loop counts from decides how many registers it takes. From the first column on, a product with a
    # residual spills on sm_80 with Triton 3.6; from 0 on, one with a norm takes half as many again.
    origin = 0 if RESIDUAL else first
    for start in range(origin, end - first + origin, K):
        column = first - origin + start + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < end
        rows = tl.load(x + row * x_stride + column, mask=is_row & is_input, other=0.0)  # [M, K]
        if norm_weight is not None:
            scale = tl.load(norm_weight + column, mask=is_input, other=0.0)
            unit = (rows.to(tl.float32) * scales).to(scale.dtype)
            rows = (unit.to(tl.float32) * scale.to(tl.float32)).to(rows.dtype)
        matrix = tl.load(weight_rows + column, mask=is_output & is_input, other=0.0)  # [N, K]
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
        if ACTIVATION is not None:
            matrix = tl.load(up_rows + column, mask=is_output & is_input, other=0.0)
            other = tl.dot(rows, tl.trans(matrix), other, input_precision="ieee")
    if SPLITS == 1:
        finish(
            total,
            other,
            out,
            squares_out,
            bias,
            tile,
            output,
            num_rows,
            outputs,
            out_stride,
            ACTIVATION,
            RESIDUAL,
            M,
        )
    else:
        width = outputs if ACTIVATION is None else 2 * outputs
        written = sums + (split * num_rows + row) * width + output[None, :]
        mask = is_row & (output < outputs)[None, :]
        tl.store(written, total, mask=mask)
        if ACTIVATION is not None:
            tl.store(written + outputs, other, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def finish_kernel(
    out,  # as in `product_kernel`
    sums,  # [S, T, O], with 2 * O for O with a gate
    squares_out,  # [blocks, M] float32, written with RESIDUAL
    bias,
    num_rows,
    outputs,
    out_stride,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    B: tl.constexpr,
):
    """B outputs of all rows."""
    wait(EARLY)
    row = tl.arange(0, M).to(tl.int64)[:, None]
    output = tl.program_id(0) * B + tl.arange(0, B)
    mask = (row < num_rows) & (output < outputs)[None, :]
    width = outputs if ACTIVATION is None else 2 * outputs
    total = tl.zeros([M, B], tl.float32)
    other = tl.zeros([M, B], tl.float32) if ACTIVATION is not None else None
    for split in tl.static_range(SPLITS):
        read = sums + (split * num_rows + row) * width + output[None, :]
        total += tl.load(read, mask=mask, other=0.0)
        if ACTIVATION is not None:
            other += tl.load(read + outputs, mask=mask, other=0.0)
    finish(
        total,
        other,
        out,
        squares_out,
        bias,
        tl.program_id(0),
        output,
        num_rows,
        outputs,
        out_stride,
        ACTIVATION,
        RESIDUAL,
        M,
    )


@cache
def _product(tiles: Tiles, activation: str | None, *, residual: bool) -> Variant:
    constexprs = {
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "SPLITS": tiles.splits,
        "M": MOST_ROWS,
        "N": tiles.outputs,
        "K": tiles.inputs,
        "PARTS": PARTS,
    }
    return Variant(product_kernel, constexprs, tiles.num_warps, tiles.num_stages, early=True)


@cache
def _finish(splits: int, activation: str | None, *, residual: bool) -> Variant:
    constexprs = {
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "SPLITS": splits,
        "M": MOST_ROWS,
        "B": BLOCK,
    }
    return Variant(finish_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: Tiles,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    activation: str | None,
    residual: torch.Tensor | None,
    quantised: tuple[Variant, torch.Tensor | None] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernels; see `kernels.few_rows`. Arguments are checked, and there is at least one row.

    `quantised`: of such a weight the kernel, see `kernels.cuda.few_rows_quantised`, and its table.

    Returns the result, and with a residual the parts of the sums of its squares.
    """
    rows, inputs = x.shape
    width = len(weight)
    outputs = width // 2 if activation is not None else width
    out = residual if residual is not None else x.new_empty(rows, outputs)
    programs = triton.cdiv(outputs, tiles.outputs)
    sums = squares = None
    if residual is not None:
        tiles_of_out = programs if tiles.splits == 1 else triton.cdiv(outputs, BLOCK)
        squares = torch.empty(tiles_of_out, MOST_ROWS, dtype=torch.float32, device=x.device)
    if tiles.splits > 1:
        sums = torch.empty(tiles.splits, rows, width, dtype=torch.float32, device=x.device)
    norm_weight, norm_squares, eps = norm or (None, None, 0.0)
    parts = 0 if norm_squares is None else len(norm_squares)
    before = bias, norm_weight, norm_squares, rows, outputs, inputs
    after = parts, x.stride(0), out.stride(0), eps
    grid, adds = (programs, tiles.splits), residual is not None
    if quantised is None:
        _product(tiles, activation, residual=adds).launch(
            grid, out, sums, squares, x, weight, *before, *after
        )
    else:
        kernel, table = quantised
        stride = weight.stride(0)
        kernel.launch(grid, out, sums, squares, x, weight, table, *before, stride, *after)
    if sums is not None:
        _finish(tiles.splits, activation, residual=residual is not None).launch(
            (triton.cdiv(outputs, BLOCK),), out, sums, squares, bias, rows, outputs, out.stride(0)
        )
    return out, squares
