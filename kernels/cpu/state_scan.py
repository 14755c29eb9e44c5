"""Calls the compiled layers that scan rows, in mamba1.cpp, mamba2.cpp and gated_delta.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers
from kernels.state_rows import StateRows


class Mamba2Weights(ctypes.Structure):
    """The struct of mamba2.h, with the same fields. The caller keeps the tensors alive."""

    kernel = "mamba2"
    _fields_ = (
        *pointers("taps bias dt_bias decays direct norm"),
        *integers("heads head_width groups state_width num_taps"),
        *doubles("eps least_step"),
    )


class GatedDeltaWeights(ctypes.Structure):
    """The struct of gated_delta.h, likewise."""

    kernel = "gated_delta"
    _fields_ = (
        *pointers("taps dt_bias decays norm"),
        *integers("key_heads key_width heads head_width num_taps adjacent is_wide"),
        *doubles("eps"),
    )


class SiluConvWeights(ctypes.Structure):
    """The struct of mamba1.cpp, likewise."""

    kernel = "silu_conv"
    _fields_ = (*pointers("taps bias"), *integers("width num_taps stride"))


class Mamba1Weights(ctypes.Structure):
    """The struct of mamba1.cpp, likewise."""

    kernel = "mamba1"
    _fields_ = (
        *pointers("dt_bias decays direct"),
        *integers("heads head_width state_width"),
    )


ScanWeights = Mamba2Weights | GatedDeltaWeights


class _Arguments(ctypes.Structure):
    """ScanArguments of state_scan.h: the fields must agree."""

    _fields_ = (
        *pointers("out projected weights inputs states"),
        *pointers("begins sources keeps"),
        *pointers("convolved prepared scanned"),
        *integers("rows"),
    )


def scan(
    projected: torch.Tensor, weights: ScanWeights, inputs: torch.Tensor, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `kernels.mamba2.mamba2` and `kernels.gated_delta.gated_delta`. Requires `can_run`."""
    rows, inner, width = len(projected), weights.heads * weights.head_width, inputs.shape[-1]
    out = torch.empty(rows, inner, dtype=projected.dtype)
    convolved = torch.empty(rows, width, dtype=projected.dtype)
    prepared, scanned = torch.empty(projected.shape), torch.empty(rows, inner)
    _run(out, projected, weights, at, inputs, states, (convolved, prepared, scanned))
    return out


def silu_conv(
    raw: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `kernels.short_conv.silu_conv`. Requires `can_run`."""
    out = torch.empty(raw.shape, dtype=raw.dtype)
    of_bias = None if bias is None else bias.data_ptr()
    weights = SiluConvWeights(taps.data_ptr(), of_bias, raw.shape[1], len(taps), raw.stride(0))
    _run(out, raw, weights, at, inputs)
    return out


def mamba1(rows: torch.Tensor, weights: Mamba1Weights, states: torch.Tensor, at: StateRows) -> torch.Tensor:
    """See `kernels.mamba1.mamba1`. Requires `can_run`."""
    out = torch.empty(len(rows), weights.heads * weights.head_width, dtype=rows.dtype)
    _run(out, rows, weights, at, None, states)
    return out


def _run(
    out: torch.Tensor,
    projected: torch.Tensor,
    weights: ScanWeights | SiluConvWeights | Mamba1Weights,
    at: StateRows,
    inputs: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    space: tuple[torch.Tensor, ...] = (),
) -> None:
    """Fills `out`. Mutates `inputs` and `states`."""
    arguments = _Arguments(
        out.data_ptr(),
        projected.data_ptr(),
        ctypes.addressof(weights),
        None if inputs is None else inputs.data_ptr(),
        None if states is None else states.data_ptr(),
        at.begins.data_ptr(),
        at.sources.data_ptr(),
        at.keeps.data_ptr(),
    )
    arguments.rows = len(projected)
    for name, tensor in zip(("convolved", "prepared", "scanned"), space, strict=False):
        setattr(arguments, name, tensor.data_ptr())
    run = library.function(
        f"quire_{weights.kernel}_{SUFFIXES[projected.dtype]}", (ctypes.c_void_p, ctypes.c_int64)
    )
    run(ctypes.addressof(arguments), torch.get_num_threads())
