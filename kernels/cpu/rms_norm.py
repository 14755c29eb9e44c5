"""Calls the compiled RMSNorm, with the residual added first or not, in rms_norm.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers


class _Arguments(ctypes.Structure):
    """NormArguments of rms_norm.h: the fields must agree."""

    _fields_ = (
        *pointers("out x residual weight"),
        *integers("rows width out_stride x_stride residual_stride wide_weight"),
        *doubles("eps"),
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`, and `add_rms_norm` where there is a residual.

    They check the arguments. Requires `can_run`. x is [T, D], its rows contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype)  # [T, D]
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        *x.shape,
        x.shape[1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        weight.dtype is torch.float32,
        eps,
    )
    run = library.function(f"quire_rms_norm_{SUFFIXES[x.dtype]}", (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
