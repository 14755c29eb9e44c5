"""The arguments of the compiled product in linear.cpp: see `kernels.packed_weight`."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers

# The rows that are copied at a time where the CPU has no instructions for their dtype.
COPIED_ROWS = 256
# kRoundedRows, kGroupInputs and sizeof(RowGroup) of grouped_product.h.
ROUNDED_ROWS, _GROUP_INPUTS, _ROW_GROUP_BYTES = 128, 32, 52


class Arguments(ctypes.Structure):
    """LinearArguments of linear.h: the fields must agree."""

    _fields_ = (
        *pointers("out x weight bias scratch"),
        *integers("rows inputs outputs x_stride out_stride"),
    )

    @classmethod
    def of(
        cls,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: torch.Tensor | None,
    ) -> Arguments:
        """The arguments for x [T, I] and contiguous out [T, O]. The caller keeps the tensors alive."""
        return cls(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            *x.shape,
            out.shape[1],
            x.stride(0),
            out.shape[1],
        )


class MatrixPart(ctypes.Structure):
    """A `kernels.weight.CompiledPart`. MatrixPart of grouped_product.h: the fields must agree."""

    _fields_ = (*pointers("weight form"), *integers("outputs scale_inputs"))


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for weights and rows of this dtype."""
    return dtype in SUFFIXES and library.available()


def copied_rows(dtype: torch.dtype, rows: int, inputs: int) -> torch.Tensor | None:
    """Memory for copies of rows [rows, inputs], if the kernels need them; its elements are undefined."""
    if dtype is torch.float32 or (library.multiplies_bfloat16() and inputs % 2 == 0):
        return None
    return torch.empty(rows * (inputs + 1), dtype=torch.float32)


def rounded_rows(rows: int, inputs: int) -> torch.Tensor:
    """Memory for rows [rows, inputs] that are rounded for quantised weights; its content is undefined."""
    return torch.empty(rows * -(-inputs // _GROUP_INPUTS) * _ROW_GROUP_BYTES, dtype=torch.uint8)
