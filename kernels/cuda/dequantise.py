"""Dequantises weights on a GPU: tiles of them in the registers of a product, or rows into memory.

`kernels.gpu_format` has the layout. An element is computed in float32 as the format defines it, in the order
of `kernels.dequantise`, and rounded once to the dtype of the product.

Dimension letters: n rows; I inputs; N rows and K inputs of a tile; C factors of a row of it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant
from kernels.gpu_format import GpuFormat

# Rows and inputs of a program that writes rows to memory.
ROWS, INPUTS = 16, 256


@triton.jit
def numbers(codes, table, FORM: tl.constexpr):
    """The numbers that values stand for, before scales are applied, in float32."""
    if FORM.kind == "float8":
        # float16 has the same fields, with more of both: exact, and infinity is none of these numbers.
        bits = (codes.to(tl.uint16) & 0x80) << 8 | (codes.to(tl.uint16) & 0x7F) << 7
        found = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif FORM.kind == "table":
        levels = tl.load(table + tl.arange(0, 16))
        found = tl.gather(levels, codes.reshape(codes.numel).to(tl.int32), 0).reshape(codes.shape)
    else:
        found = codes.to(tl.float32) - FORM.offset
    return found


@triton.jit
def scales_of(rows, at, place, mask, FORM: tl.constexpr):
    """Scales or minima [N, C] in float32. `place`: which ones of a row."""
    if FORM.scale_dtype == "float32":
        address = (rows + at).to(tl.pointer_type(tl.float32))
    elif FORM.scale_dtype == "float16":
        address = (rows + at).to(tl.pointer_type(tl.float16))
    else:
        address = (rows + at).to(tl.pointer_type(tl.bfloat16))
    return tl.load(address + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def signed(address, place, mask):
    """Integers of 8 bits in float32."""
    return tl.load(address.to(tl.pointer_type(tl.int8)) + place, mask=mask, other=0).to(tl.float32)


@triton.jit
def tile(
    rows,  # [N, 1] uint8, where each begins
    table,  # [16] float32, or None
    is_row,  # [N, 1]; of others nothing is read
    first,  # a multiple of K
    inputs,  # I
    FORM: tl.constexpr,  # a GpuFormat
    N: tl.constexpr,
    K: tl.constexpr,
):
    """The elements of N rows and K inputs, in float32: [N, K]. Behind the inputs all are finite."""
    groups = tl.cdiv(inputs, 32)
    scale_count = tl.cdiv(groups * 32, FORM.group)
    scale_bytes = scale_count * (4 if FORM.scale_dtype == "float32" else 2)
    minima_at = groups * 4 * FORM.bits + scale_bytes
    zeros_at = minima_at + (scale_bytes if FORM.minima else 0)
    subscales_at = zeros_at + (scale_count if FORM.zeros else 0)
    subminima_at = subscales_at + groups * FORM.subscales

    byte = first * FORM.bits // 8 + tl.arange(0, K * FORM.bits // 8)[None, :]
    codes = tl.load(rows + byte, mask=is_row & (byte < groups * 4 * FORM.bits), other=0)
    if FORM.bits == 4:
        codes = tl.join(codes & 15, codes >> 4).reshape(N, K)

    unit: tl.constexpr = min(K, FORM.unit)  # inputs
    count: tl.constexpr = K // unit
    begin = first + tl.arange(0, count)[None, :] * unit  # [1, C] inputs
    mask = is_row & (begin < inputs)
    place = begin // FORM.group
    scale = scales_of(rows, groups * 4 * FORM.bits, place, mask, FORM)  # [N, C]
    minimum = scale
    if FORM.minima:
        minimum = scales_of(rows, minima_at, place, mask, FORM)
    if FORM.packs_subscales:
        both = tl.load(rows + subscales_at + begin // FORM.unit, mask=mask, other=0)
        scale *= (both & 15).to(tl.float32)
        minimum *= -(both >> 4).to(tl.float32)
    elif FORM.subscales:
        scale *= signed(rows + subscales_at, begin // FORM.unit, mask)
        if FORM.minima:
            minimum *= -signed(rows + subminima_at, begin // FORM.unit, mask)
    elements = numbers(codes, table, FORM).reshape(N, count, unit)
    if FORM.zeros:
        elements -= signed(rows + zeros_at, place, mask)[:, :, None]
    elements *= scale[:, :, None]
    if FORM.minima:
        elements += minimum[:, :, None]
    return elements.reshape(N, K)


@triton.jit(
    do_not_specialize=["num_rows", "first_row", "rows_of_expert"],
    do_not_specialize_on_alignment=["starts"],
)
def dequantise_kernel(
    out,  # [n, I] contiguous, written
    weight,  # [rows, bytes of a row] uint8
    table,  # as in `tile`
    indices,  # [n] int64, or None: the rows are those from `first_row` on
    first_row,
    num_rows,  # n
    inputs,
    weight_stride,
    starts,  # where the pairs of each expert begin, see `kernels.cuda.experts`; or None
    rows_of_expert,
    FORM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """N rows and K inputs. Rows of experts without pairs are not written."""
    wait(EARLY)
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)[:, None]  # [N, 1]
    is_row = place < num_rows
    if starts is not None:
        of_expert = starts + place // rows_of_expert
        begin = tl.load(of_expert, mask=is_row, other=0)
        is_row &= begin < tl.load(of_expert + 1, mask=is_row, other=0)
        if tl.max(is_row.to(tl.int32)) == 0:
            return
    row = first_row + place
    if indices is not None:
        row = tl.load(indices + place, mask=is_row, other=0)
    first = tl.program_id(1) * K
    elements = tile(weight + row * weight_stride, table, is_row, first, inputs, FORM, N, K)
    column = first + tl.arange(0, K)[None, :]
    tl.store(
        out + place * inputs + column, elements.to(out.dtype.element_ty), mask=is_row & (column < inputs)
    )


@cache
def _variant(form: GpuFormat) -> Variant:
    return Variant(dequantise_kernel, {"FORM": form, "N": ROWS, "K": INPUTS}, 4, 1, early=True)


def dequantise(
    weight: torch.Tensor,
    form: GpuFormat,
    table: torch.Tensor | None,
    indices: torch.Tensor | range,
    inputs: int,
    dtype: torch.dtype,
    *,
    starts: torch.Tensor | None = None,
    rows_of_expert: int = 1,
) -> torch.Tensor:
    """Rows of a weight, as a new tensor [n, I].

    Args:
        weight: [O, bytes of a row] uint8, contiguous.
        form: How it is held.
        table: `kernels.gpu_format.table_of` the form.
        indices: Which rows: [n] int64, or consecutive ones. Each must be from 0 to O - 1.
        inputs: I.
        dtype: That of the result.
        starts: The rows are those of experts, and only of those that have pairs they are computed: where the
            pairs of each begin, one more than there are experts. None: all are.
        rows_of_expert: How many each has.
    """
    out = torch.empty(len(indices), inputs, dtype=dtype, device=weight.device)
    first, chosen = (indices.start, None) if isinstance(indices, range) else (0, indices.contiguous())
    if len(out):
        grid = triton.cdiv(len(out), ROWS), triton.cdiv(inputs, INPUTS)
        rows = first, len(out), inputs, weight.stride(0)
        _variant(form).launch(grid, out, weight, table, chosen, *rows, starts, rows_of_expert)
    return out
