"""Calls the compiled residual add and RMSNorm of rms_norm.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library

# By the dtypes of x and of the weight.
_ENTRY_POINTS = {
    (torch.bfloat16, torch.bfloat16): "quire_add_rms_norm_bf16",
    (torch.bfloat16, torch.float32): "quire_add_rms_norm_bf16_f32",
    (torch.float32, torch.float32): "quire_add_rms_norm_f32",
}
_ARGUMENTS = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int64,) * 4, ctypes.c_double, ctypes.c_int64)


def can_add_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes tensors of this device and these dtypes, and is there."""
    return x.device.type == "cpu" and (x.dtype, weight.dtype) in _ENTRY_POINTS and library.available()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.add_rms_norm`, which has checked the arguments; `can_add_rms_norm` is true."""
    out = torch.empty(x.shape, dtype=x.dtype)  # [T, D]
    library.function(_ENTRY_POINTS[x.dtype, weight.dtype], _ARGUMENTS)(
        out.data_ptr(),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        *x.shape,
        x.stride(0),
        residual.stride(0),
        eps,
        torch.get_num_threads(),
    )
    return out
