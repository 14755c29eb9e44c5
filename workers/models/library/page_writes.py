"""Writes the keys and values of a forward's tokens to their slots, layer by layer.

Unlike `kernels.kv_write` it checks the slots once per forward and not in every layer, since each check waits
for a GPU. It also supports values of another width than keys.

Dimension letters: T tokens; P pages; S tokens per page; K key-value heads; D width of a key; E of a value.
"""

from __future__ import annotations

import torch


class PageWrites:
    """Writes to the slots of one forward's tokens."""

    def __init__(self, slots: torch.Tensor) -> None:
        """`slots`: [T] int, page * S + offset; negative for a padding token, which is not written."""
        used = slots >= 0  # [T]
        self._rows = None if bool(used.all()) else used.nonzero()[:, 0]
        self._slots = (slots if self._rows is None else slots[self._rows]).long()

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> None:
        """Write a layer's keys [T, K, D] and values [T, K, E].

        Mutates only these slots of `k_pages` [P, S, K, D] and `v_pages` [P, S, K, E].

        Raises:
            IndexError, RuntimeError: A slot is beyond the last page (on the CPU), or the dtypes differ.
        """
        for new, pages in ((keys, k_pages), (values, v_pages)):
            rows = new if self._rows is None else new[self._rows]
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self._slots, rows)
