"""Calls the compiled layers that scan rows, in mamba2.cpp and gated_delta.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.state_rows import StateRows


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Mamba2Weights(ctypes.Structure):
    """That of mamba2.h: the fields must agree. Who makes one keeps the tensors."""

    kernel = "mamba2"
    _fields_ = (
        *_fields(ctypes.c_void_p, "taps bias dt_bias decays direct norm"),
        *_fields(ctypes.c_int64, "heads head_width groups state_width num_taps"),
        *_fields(ctypes.c_double, "eps least_step"),
    )


class GatedDeltaWeights(ctypes.Structure):
    """That of gated_delta.h, likewise."""

    kernel = "gated_delta"
    _fields_ = (
        *_fields(ctypes.c_void_p, "taps dt_bias decays norm"),
        *_fields(ctypes.c_int64, "key_heads key_width heads head_width num_taps adjacent"),
        ("eps", ctypes.c_double),
    )


ScanWeights = Mamba2Weights | GatedDeltaWeights


class _Arguments(ctypes.Structure):
    """ScanArguments of state_scan.h: the fields must agree."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "out projected weights inputs states"),
        *_fields(ctypes.c_void_p, "begins sources write_ends write_slots"),
        ("num_writes", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "convolved unit scanned"),
        ("rows", ctypes.c_int64),
    )


def can_scan(projected: torch.Tensor) -> bool:
    """Whether there is a kernel for this device and dtype."""
    return projected.device.type == "cpu" and projected.dtype in SUFFIXES and library.available()


def scan(
    projected: torch.Tensor, weights: ScanWeights, inputs: torch.Tensor, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `kernels.mamba2.mamba2` and `kernels.gated_delta.gated_delta`. Requires `can_scan`."""
    rows, inner, width = len(projected), weights.heads * weights.head_width, inputs.shape[-1]
    out = torch.empty(rows, inner, dtype=projected.dtype)
    convolved = torch.empty(rows, width, dtype=projected.dtype)
    unit, scanned = torch.empty(rows, width - inner), torch.empty(rows, inner)
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
        unit.data_ptr(),
        scanned.data_ptr(),
        rows,
    )
    name = f"quire_{weights.kernel}_{SUFFIXES[projected.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
