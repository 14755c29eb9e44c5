"""Calls the compiled gated activations in gated_activation.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library

_ENTRY_POINTS = {
    (dtype, activation): f"quire_{activation}_mul_{suffix}"
    for dtype, suffix in library.SUFFIXES.items()
    for activation in ("silu", "gelu_tanh", "gelu")
}
_ARGUMENTS = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 4)


def can_gated_activation(gate_up: torch.Tensor) -> bool:
    """Whether there is a kernel for this device and dtype. It supports every activation."""
    return gate_up.device.type == "cpu" and gate_up.dtype in library.SUFFIXES and library.available()


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `kernels.gated_activation.gated_activation`, which checks the arguments.

    Requires `can_gated_activation`.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)  # [T, I]
    library.function(_ENTRY_POINTS[gate_up.dtype, activation], _ARGUMENTS)(
        out.data_ptr(), gate_up.data_ptr(), rows, width, gate_up.stride(0), torch.get_num_threads()
    )
    return out
