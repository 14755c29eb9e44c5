"""Pages as the compiled kernels of the CPU want them."""

from __future__ import annotations

import torch

from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues, Pages


def packed(k_pages: torch.Tensor, v_pages: torch.Tensor) -> tuple[PackedKeys, PackedValues]:
    """Packed copies of keys [P, S, K, D] and values [P, S, K, V]."""
    found = PackedKeys(torch.empty_like(k_pages)), PackedValues(torch.empty_like(v_pages))
    slots = torch.arange(k_pages.shape[0] * k_pages.shape[1])
    kv_write(k_pages.flatten(0, 1), v_pages.flatten(0, 1), *found, slots)
    return found


def dense(pages: Pages) -> torch.Tensor:
    """A plain copy, [P, S, K, D]."""
    return pages.clone() if isinstance(pages, torch.Tensor) else pages.dense(torch.arange(pages.shape[0]))
