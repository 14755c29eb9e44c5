"""Calls the compiled Mamba 2 in mamba2.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.state_rows import StateRows


class Weights(ctypes.Structure):
    """Mamba2Weights of mamba2.h: the fields must agree. Who makes one keeps the tensors."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("taps", "bias", "dt_bias", "decays", "direct", "norm")),
        *((name, ctypes.c_int64) for name in ("heads", "head_width", "groups", "state_width", "num_taps")),
        ("eps", ctypes.c_double),
    )


class _Arguments(ctypes.Structure):
    """Arguments of mamba2.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "projected", "weights", "inputs", "states")),
        *((name, ctypes.c_void_p) for name in ("begins", "sources", "write_ends", "write_slots")),
        ("num_writes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("convolved", "scanned")),
        ("rows", ctypes.c_int64),
    )


def can_mamba2(projected: torch.Tensor) -> bool:
    """Whether there is a kernel for this device and dtype."""
    return projected.device.type == "cpu" and projected.dtype in SUFFIXES and library.available()


def mamba2(
    projected: torch.Tensor, weights: Weights, inputs: torch.Tensor, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `kernels.mamba2.mamba2`. Requires `can_mamba2`."""
    rows, inner = len(projected), weights.heads * weights.head_width
    out = torch.empty(rows, inner, dtype=projected.dtype)
    convolved = torch.empty(rows, inputs.shape[-1], dtype=projected.dtype)
    scanned = torch.empty(rows, inner)
    arguments = _Arguments(
        out.data_ptr(),
        projected.data_ptr(),
        ctypes.addressof(weights),
        inputs.data_ptr(),
        states.data_ptr(),
        at.begins.data_ptr(),
        at.sources.data_ptr(),
        at.write_ends.data_ptr(),
        at.write_slots.data_ptr(),
        len(at.write_ends),
        convolved.data_ptr(),
        scanned.data_ptr(),
        rows,
    )
    name = f"quire_mamba2_{SUFFIXES[projected.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
