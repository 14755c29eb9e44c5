"""Memory in pages of 2 MiB, where Linux has them: reads need fewer address translations."""

from __future__ import annotations

import ctypes
import math
import sys

import torch

_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_PIECES_BYTES, _LINE_BYTES = 64 << 20, 64


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, *, filled_from_start: int = 1
) -> torch.Tensor:
    """An uninitialised tensor; on a Linux CPU in huge pages, unless it is smaller than one.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        filled_from_start: The number of equal parts of the memory that are each filled from their start. If
            there are several, the first 2 MiB of each are in small pages, so that a part that holds little
            takes little memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or torch.device(device).type != "cpu" or nbytes < _PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # What lies before the first huge page is never touched, so it takes no memory.
    memory = torch.empty(nbytes + _PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % _PAGE_BYTES
    part, small = nbytes // filled_from_start, 0 if filled_from_start == 1 else _PAGE_BYTES
    for begin in range(0, part * filled_from_start, part):
        huge = -(-(begin + small) // _PAGE_BYTES) * _PAGE_BYTES
        if huge < begin + part:
            _advise(memory.data_ptr() + first + huge, begin + part - huge)
    return memory[first : first + nbytes].view(dtype).view(shape)


def _advise(address: int, nbytes: int) -> None:
    # The result does not matter: a kernel without huge pages refuses, and the memory is usable.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)


class Pieces:
    """Memory for many small tensors next to each other, so that they have huge pages too."""

    def __init__(self, device: torch.device | str) -> None:
        """Nothing is allocated yet."""
        self._device = device
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, nbytes: int) -> torch.Tensor:
        """`nbytes` uninitialised bytes, aligned to a cache line."""
        if nbytes >= _PIECES_BYTES // 4:
            return empty((nbytes,), torch.uint8, self._device)
        if len(self._left) < nbytes:
            # What is left is not touched, so it takes no memory.
            self._left = empty((_PIECES_BYTES,), torch.uint8, self._device)
        piece, self._left = self._left[:nbytes], self._left[-(-nbytes // _LINE_BYTES) * _LINE_BYTES :]
        return piece
