"""Writes the keys and values of a forward's tokens to their slots, layer by layer.

For models without fused kernels for this. For plain pages the slots are checked once per forward and not in
every layer, since each check waits for the GPU; packed pages have a kernel.

Dimension letters: T tokens; P pages; S tokens per page; K key-value heads; D width of a key; E of a value.
"""

from __future__ import annotations

import torch

from kernels.cpu.kv_write import kv_write
from kernels.packed_pages import PackedKeys, PackedValues, Pages


class PageWrites:
    """Writes to the slots of one forward's tokens."""

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots`: [T] int, page * S + offset; negative for a padding token, which is not written."""
        self._with_padding = slots
        used = slots >= 0  # [T]
        self._rows = None if bool(used.all()) else used.nonzero()[:, 0]
        self._slots = (slots if self._rows is None else slots[self._rows]).long()

    def write(self, keys: torch.Tensor, values: torch.Tensor, k_pages: Pages, v_pages: Pages) -> None:
        """Write a layer's keys [T, K, D] and values [T, K, E].

        Mutates only these slots of `k_pages` [P, S, K, D] and `v_pages` [P, S, K, E].

        Raises IndexError or RuntimeError if a slot is beyond the last page (on the CPU), or the dtypes
        differ.
        """
        if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
            kv_write(keys, values, k_pages, v_pages, self._with_padding)
            return
        assert isinstance(k_pages, torch.Tensor) and isinstance(v_pages, torch.Tensor)
        for new, pages in ((keys, k_pages), (values, v_pages)):
            rows = new if self._rows is None else new[self._rows]
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self._slots, rows)
