"""Which implementations of the kernels are in use, by name."""

from __future__ import annotations

import torch

from kernels.cpu.library import kernel_name
from kernels.linear import can_pack
from kernels.paged_attention import CUDA_WIDTHS

# In the place of compiled kernels for the CPU: it is slower.
NOT_COMPILED = "cpu-not-compiled"


def active_kernels(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """What a model of this dtype on this device runs on, such as ("torch", "onednn-packed", "cpu-avx512")."""
    if device.type == "cuda":
        return ("torch", "triton")  # of the weightless model, whose heads are too narrow, the sampling only
    names = ["torch"]
    if can_pack(torch.empty(1, 1, dtype=dtype, device=device)):
        names.append("onednn-packed")
    return (*names, kernel_name() or NOT_COMPILED)


def cuda_head_widths() -> tuple[int, ...]:
    """Head widths that a model may have on a CUDA device."""
    return CUDA_WIDTHS
