"""Calls the compiled gate of silu_mul.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library

_ENTRY_POINTS = {torch.bfloat16: "quire_silu_mul_bf16", torch.float32: "quire_silu_mul_f32"}
_ARGUMENTS = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 4)


def can_silu_mul(gate_up: torch.Tensor) -> bool:
    """Whether the kernel takes a tensor of this device and dtype, and is there."""
    return gate_up.device.type == "cpu" and gate_up.dtype in _ENTRY_POINTS and library.available()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.silu_mul.silu_mul`, which has checked the argument; `can_silu_mul` is true."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)  # [T, I]
    library.function(_ENTRY_POINTS[gate_up.dtype], _ARGUMENTS)(
        out.data_ptr(), gate_up.data_ptr(), rows, width, gate_up.stride(0), torch.get_num_threads()
    )
    return out
