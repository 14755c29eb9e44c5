"""Products of up to 16 rows with a quantised weight, which is dequantised in registers, a tile at a time.

As `kernels.cuda.few_rows`, from which all comes that is around the tiles. It is a kernel of its own, so that
the one for dense weights stays as small as it is.

Dimension letters: T rows, at most M; I inputs; O outputs; S parts of the inputs; M rows, N outputs and K
inputs of a tile.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from kernels.cuda.dependent_launch import fetch_rows, wait
from kernels.cuda.dequantise import tile as tile_of
from kernels.cuda.few_rows import PARTS, TILES_AHEAD, finish, row_scales
from kernels.cuda.variant import Variant
from kernels.few_rows_tiles import MOST_ROWS, Tiles
from kernels.gpu_format import GpuFormat


# The number of rows may not compile another variant: none may be compiled after the first steps.
@triton.jit(do_not_specialize=["num_rows", "parts"])
def quantised_product_kernel(
    out,  # [T, O], written; with RESIDUAL the residual stream, mutated
    sums,  # [S, T, O] float32, written, with 2 * O for O with a gate; or None: S is 1
    squares_out,  # [tiles, M] float32, written with RESIDUAL, if S is 1
    x,  # [T, I]
    weight,  # [O, bytes of a row] uint8, contiguous; with a gate 2 * O rows
    table,  # see `kernels.cuda.dequantise.tile`
    bias,  # [O] or [2 * O], or None
    norm_weight,  # [I], or None: x is not normalised
    squares,  # [parts, M] float32, of x
    num_rows,  # T
    outputs,  # O
    inputs,  # I
    weight_stride,  # bytes of a row
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
    FORM: tl.constexpr,  # a GpuFormat
):
    """N outputs of all rows, or one part of their sums."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * N + tl.arange(0, N)  # [N]
    length = tl.cdiv(tl.cdiv(inputs, K), SPLITS) * K
    first = split * length
    if EARLY:
        ahead: tl.constexpr = TILES_AHEAD * K * FORM.bits // 8
        begin = first * FORM.bits // 8
        fetch_rows(weight, output, outputs - 1, weight_stride, begin, ahead)
        if ACTIVATION is not None:
            fetch_rows(weight, output + outputs, 2 * outputs - 1, weight_stride, begin, ahead)
    wait(EARLY)
    row = tl.arange(0, M).to(tl.int64)[:, None]  # [M, 1]
    is_row, is_output = row < num_rows, (output < outputs)[:, None]
    weight_rows = weight + output.to(tl.int64)[:, None] * weight_stride  # [N, 1]
    up_rows = weight + (output + outputs).to(tl.int64)[:, None] * weight_stride
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
        at = first - origin + start
        column = at + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < end
        rows = tl.load(x + row * x_stride + column, mask=is_row & is_input, other=0.0)  # [M, K]
        if norm_weight is not None:
            scale = tl.load(norm_weight + column, mask=is_input, other=0.0)
            unit = (rows.to(tl.float32) * scales).to(scale.dtype)
            rows = (unit.to(tl.float32) * scale.to(tl.float32)).to(rows.dtype)
        matrix = tile_of(weight_rows, table, is_output, at, inputs, FORM, N, K).to(rows.dtype)  # [N, K]
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
        if ACTIVATION is not None:
            matrix = tile_of(up_rows, table, is_output, at, inputs, FORM, N, K).to(rows.dtype)
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


@cache
def variant(tiles: Tiles, activation: str | None, form: GpuFormat, *, residual: bool) -> Variant:
    """The kernel for a format, with these tiles and what is around the product."""
    constexprs = {
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "SPLITS": tiles.splits,
        "M": MOST_ROWS,
        "N": tiles.outputs,
        "K": tiles.inputs,
        "PARTS": PARTS,
        "FORM": form,
    }
    return Variant(quantised_product_kernel, constexprs, tiles.num_warps, tiles.num_stages, early=True)
