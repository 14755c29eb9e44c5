"""The dtypes of the compiled kernels."""

import torch

from kernels.cpu import library

# The dtypes of kernels that exist for several, with the suffixes of their functions' names.
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def can_run(x: torch.Tensor) -> bool:
    """Whether there are compiled kernels for the device and dtype of a tensor."""
    return x.device.type == "cpu" and x.dtype in SUFFIXES and library.available()
