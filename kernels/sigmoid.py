"""The sigmoid. On a CPU its bits do not depend on the number of elements, as those of torch.sigmoid do."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES

_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same shape and dtype: float32, bfloat16 or float16."""
    if x.device.type != "cpu" or x.dtype not in SUFFIXES or not library.available():
        return torch.sigmoid(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    run = library.function(f"quire_sigmoid_{SUFFIXES[x.dtype]}", _TYPES)
    run(out.data_ptr(), x.data_ptr(), x.numel(), torch.get_num_threads())
    return out
