"""Memory in pages of 2 MiB, where Linux has them: reads need fewer address translations."""

from __future__ import annotations

import ctypes
import math
import sys

import torch

_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised tensor; on a Linux CPU in huge pages, unless it is smaller than one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or torch.device(device).type != "cpu" or nbytes < _PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # What lies before the first huge page is never touched, so it takes no memory.
    memory = torch.empty(nbytes + _PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % _PAGE_BYTES
    # The result does not matter: a kernel without huge pages refuses, and the memory is usable.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.data_ptr() + first), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE
    )
    return memory[first : first + nbytes].view(dtype).view(shape)
