"""Divides logits, or bounds them: cap * tanh(x / cap). Each operation is rounded to their dtype.

torch would divide the logits of a large vocabulary on threads of its own. They go on to spin for some
milliseconds, on the cores of the threads of the next step.

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
    return _run("softcap", logits, cap)


def divide(logits: torch.Tensor, by: float) -> torch.Tensor:
    """Likewise."""
    return _run("divide", logits, by) if can_run(logits) else logits.div_(by)


def _run(name: str, logits: torch.Tensor, number: float) -> torch.Tensor:
    if not logits.is_contiguous():
        raise ValueError(f"logits: must be contiguous, got strides {logits.stride()}")
    run = library.function(f"quire_{name}_{SUFFIXES[logits.dtype]}", _TYPES)
    run(logits.data_ptr(), logits.numel(), number, torch.get_num_threads())
    return logits
