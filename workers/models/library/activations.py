"""Activations of the library whose results do not depend on an element's place in a tensor.

torch computes an activation with vector instructions, but the rest at the end of a tensor, or of a thread's
part, element by element with functions that round differently. So the bits of a row depend on the rows before
it, unless its width is a multiple of two vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import activations

# Modules that call a function which torch computes in two ways: silu, gelu, sigmoid, softplus or mish.
_KINDS = (
    nn.GELU,
    nn.Mish,
    nn.Sigmoid,
    nn.SiLU,
    activations.ClippedGELUActivation,
    activations.GELUActivation,
    activations.GELUTanh,
    activations.MishActivation,
    activations.QuickGELUActivation,
    activations.SiLUActivation,
    activations.SqrtSoftplusActivation,
)
# Two vectors of AVX-512 in bfloat16.
_STEP = 64
# The least number of elements that torch gives to a thread.
_ELEMENTS_PER_THREAD = 32768


def fix_activations(module: nn.Module) -> None:
    """Let the activations of a model on the CPU compute whole steps. Mutates `module`."""
    for part in module.modules():
        if type(part) in _KINDS:
            part.forward = functools.partial(_in_whole_steps, part.forward)


def _in_whole_steps(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function so that each thread computes whole steps."""
    threads = torch.get_num_threads()
    all_threads = x.numel() >= threads * _ELEMENTS_PER_THREAD
    missing = -x.numel() % (_STEP * threads if all_threads else _STEP)
    whole = functional.pad(x.flatten(), (0, missing)) if missing else x.flatten()
    # torch would split a small tensor over fewer threads, at other places.
    torch.set_num_threads(threads if all_threads else 1)
    try:
        return function(whole)[: x.numel()].view(x.shape)
    finally:
        torch.set_num_threads(threads)
