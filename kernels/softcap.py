"""Bounds logits: cap * tanh(x / cap), each operation rounded to their dtype, as in transformers.

Dimension letters: R rows; V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES, can_run

_TYPES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64)


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Mutates and returns logits [R, V], which are contiguous; float32, bfloat16 or float16."""
    if not can_run(logits):
        return logits.div_(cap).tanh_().mul_(cap)
    if not logits.is_contiguous():
        raise ValueError(f"logits: must be contiguous, got strides {logits.stride()}")
    run = library.function(f"quire_softcap_{SUFFIXES[logits.dtype]}", _TYPES)
    run(logits.data_ptr(), logits.numel(), cap, torch.get_num_threads())
    return logits
