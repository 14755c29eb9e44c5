"""Calls the compiled gated activations in gated_activation.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers

# As in gates.h.
_UNGATED = 4


class _Arguments(ctypes.Structure):
    """GateArguments of gated_activation.h: the fields must agree."""

    _fields_ = (*pointers("out gate_up"), *integers("rows width stride activation"))


def gated_activation(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    """See `kernels.gated_activation.gated_activation`, which checks the arguments.

    Requires `can_run`. The activation is its place in ACTIVATIONS there.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 if activation == _UNGATED else 2)
    out = torch.empty(rows, width, dtype=gate_up.dtype)  # [T, I]
    arguments = _Arguments(out.data_ptr(), gate_up.data_ptr(), rows, width, gate_up.stride(0), activation)
    name = f"quire_gated_activation_{SUFFIXES[gate_up.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
