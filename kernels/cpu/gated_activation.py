"""Calls the compiled gated activations in gated_activation.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES

# As in gates.h.
_UNGATED = 4


class _Arguments(ctypes.Structure):
    """GateArguments of gated_activation.h: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "gate_up")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "stride", "activation")),
    )


def can_gated_activation(gate_up: torch.Tensor) -> bool:
    """Whether there is a kernel for this device and dtype. It supports every activation."""
    return gate_up.device.type == "cpu" and gate_up.dtype in SUFFIXES and library.available()


def gated_activation(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    """See `kernels.gated_activation.gated_activation`, which checks the arguments.

    Requires `can_gated_activation`. The activation is its place in ACTIVATIONS there.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 if activation == _UNGATED else 2)
    out = torch.empty(rows, width, dtype=gate_up.dtype)  # [T, I]
    arguments = _Arguments(out.data_ptr(), gate_up.data_ptr(), rows, width, gate_up.stride(0), activation)
    name = f"quire_gated_activation_{SUFFIXES[gate_up.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
