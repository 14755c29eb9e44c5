"""Calls the compiled product in linear.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.packed_weight import PackedWeight

# The rows that are copied at a time where the CPU has no instructions for their dtype.
_COPIED_ROWS = 256


class _Arguments(ctypes.Structure):
    """LinearArguments of linear.h: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "weight", "bias", "scratch")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "x_stride")),
    )


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for weights and rows of this dtype."""
    return dtype in SUFFIXES and library.available()


def copied_rows(dtype: torch.dtype, rows: int, inputs: int) -> torch.Tensor | None:
    """Memory for copies of rows [rows, inputs], if the kernels need them; its elements are undefined."""
    if dtype is torch.float32 or (library.multiplies_bfloat16() and inputs % 2 == 0):
        return None
    return torch.empty(rows * (inputs + 1), dtype=torch.float32)


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.linear.linear`, which checks the arguments. Requires `can_multiply`."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype)  # [T, O]
    scratch = copied_rows(x.dtype, min(rows, _COPIED_ROWS), inputs)
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        weight.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if scratch is None else scratch.data_ptr(),
        rows,
        inputs,
        outputs,
        x.stride(0),
    )
    run = library.function(f"quire_linear_{SUFFIXES[x.dtype]}", (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
