"""Pages as the compiled kernels of the CPU want them."""

from __future__ import annotations

import torch

from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import SCALE_BYTES, PackedKeys, PackedValues, Pages


def packed(
    k_pages: torch.Tensor, v_pages: torch.Tensor, *, quantised: bool = False
) -> tuple[PackedKeys, PackedValues]:
    """Packed copies of keys [P, S, K, D] and values [P, S, K, V]."""
    found = PackedKeys(*_room(k_pages, quantised)), PackedValues(*_room(v_pages, quantised))
    slots = torch.arange(k_pages.shape[0] * k_pages.shape[1])
    kv_write(k_pages.flatten(0, 1), v_pages.flatten(0, 1), *found, slots)
    return found


def _room(pages: torch.Tensor, quantised: bool) -> tuple[torch.Tensor, torch.dtype]:
    """Memory for pages like these, all bits of which are set, and their dtype."""
    shape, dtype = (*pages.shape[:3], pages.shape[3] + SCALE_BYTES * quantised), pages.dtype
    return torch.full(shape, -1, dtype=torch.int8) if quantised else torch.full(
        shape, torch.nan, dtype=dtype
    ), dtype


def dense(pages: Pages) -> torch.Tensor:
    """A plain copy, [P, S, K, D]."""
    return pages.clone() if isinstance(pages, torch.Tensor) else pages.dense(torch.arange(pages.shape[0]))
