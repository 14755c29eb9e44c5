"""Calls the compiled residual add and RMSNorm in rms_norm.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library

_ENTRY_POINTS = {
    torch.bfloat16: "quire_add_rms_norm_bf16",
    torch.float32: "quire_add_rms_norm_f32",
}
_FLOAT32_WEIGHT = "quire_add_rms_norm_bf16_f32"  # with x in bfloat16
_ARGUMENTS = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int64,) * 4, ctypes.c_double, ctypes.c_int64)


def can_add_rms_norm(x: torch.Tensor) -> bool:
    """Whether the kernel is available and supports this device and dtype."""
    return x.device.type == "cpu" and x.dtype in _ENTRY_POINTS and library.available()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.add_rms_norm`, which checks the arguments. Requires `can_add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype)  # [T, D]
    entry_point = _ENTRY_POINTS[x.dtype] if weight.dtype is x.dtype else _FLOAT32_WEIGHT
    library.function(entry_point, _ARGUMENTS)(
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
