"""The memory of the KV cache: keys and values of all layers, in pages. No accounting.

Who owns which page, and which of its slots mean something, is known to `page_pool` and `sequence` only.
Memory is not initialised: what kernels find in slots that hold no token must not reach a result.

Dimension letters: L layers; P pages; S tokens a page; K key-value heads; D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Pages copied in one go: bounds the temporary of `copy_pages`.
_COPY_BATCH_PAGES = 16


class KvTensors:
    """Pages of one worker. A page holds the same tokens in every layer.

    The tensors live as long as this object and never move, so views of them may be kept.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate; on the CPU the system commits a page of ours only when it is first written.

        Raises:
            ValueError: A size is below 1.
        """
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: must be at least 1, got {size}")
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        # One piece of memory, so that a page is copied in all layers at once. K is index 0, V index 1.
        self._data = torch.empty(
            (num_layers, 2, num_pages, page_size, kv_heads, head_dim), dtype=dtype, device=self.device
        )  # [L, 2, P, S, K, D]
        self._layers = [(self._data[i, 0], self._data[i, 1]) for i in range(num_layers)]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: K and V of all layers."""
        return self._data.nbytes // self.num_pages

    @staticmethod
    def page_bytes(
        *, num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page of this shape takes: K and V of all layers."""
        return 2 * num_layers * page_size * kv_heads * head_dim * dtype.itemsize

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [P, S, K, D] contiguous. Views: writing to them writes the cache."""
        return self._layers[index]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, in every layer.

        Mutates the destination pages.

        Args:
            pairs: (source, destination) page numbers. A source may occur more than once; a destination only
                once, and never as a source, so that the order does not matter.

        Raises:
            ValueError: A page is out of range, or a destination occurs twice or as a source.
        """
        if not pairs:
            return
        sources, destinations = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for page in (*sources, *destinations):
            if not 0 <= page < self.num_pages:
                raise ValueError(f"pairs: page must be in 0..{self.num_pages - 1}, got {page}")
        unique = set(destinations)
        if len(unique) != len(destinations) or not unique.isdisjoint(sources):
            raise ValueError("pairs: a destination must occur once, and not as a source")
        for first in range(0, len(pairs), _COPY_BATCH_PAGES):
            batch = slice(first, first + _COPY_BATCH_PAGES)
            source = torch.tensor(sources[batch], device=self.device)
            destination = torch.tensor(destinations[batch], device=self.device)
            self._data.index_copy_(2, destination, self._data.index_select(2, source))
