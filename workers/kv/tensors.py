"""The memory of the KV cache: keys and values of all layers, in pages.

The accounting of pages and slots is in `page_pool` and `table`. Memory is not initialised: slots without a
token may contain any bits, also NaN, which must not affect results.

Dimension letters: L layers; P pages; S tokens a page; K key-value heads; D width of a head, of its keys or of
its values; N tensors of one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.packed_pages import SCALE_BYTES, PackedKeys, PackedValues, Pages, can_pack
from workers import huge_pages
from workers.kv.page_pool import is_state
from workers.kv.state_tensors import StateTensors

# Pages copied at once. Limits the temporary memory of `copy_pages`.
_COPY_BATCH_PAGES = 16


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The KV of one token in a layer: for each of `kv_heads` a key of `key_dim` and a value of `value_dim`.

    Attributes:
        in_keys: A value is the first elements of its key, and has no memory of its own.

    Raises:
        ValueError: A size is below 1.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    in_keys: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_heads", "key_dim", "value_dim"):
            _check_size(name, getattr(self, name))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """[K, D] of a token's keys, and of its values if they have memory."""
        dims = [self.key_dim] if self.in_keys else [self.key_dim, self.value_dim]
        return [(self.kv_heads, dim) for dim in dims]


class OtherRanks(Protocol):
    """The other ranks of a worker, which number their pages alike: see `runners.tensor_parallel`."""

    # The number of ranks, including this one.
    ranks: int

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do what `KvTensors.copy_pages` has done."""

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do what `KvTensors.move_slots` has done."""


class KvTensors:
    """Pages of one worker, or of one of its ranks. A page holds the same tokens in every layer.

    The tensors exist as long as this object and never move, so views of them may be kept.

    Attributes:
        quantised: Whether keys and values are stored in 8 bits with a scale each.
        others: On rank 0, the other ranks, which copy what this one copies. None: there are none.
        states: The states of recurrent layers. None: the model has none.
    """

    def __init__(  # noqa: PLR0913 - how the pages of a model are stored
        self,
        layers: Sequence[LayerKv],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pack: bool = True,
        states: StateTensors | None = None,
        quantised: bool = False,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate. On the CPU the system provides memory when it is first written.

        Args:
            layers: The shape of each layer; they may differ.
            num_pages: P.
            page_size: S.
            dtype: The dtype of keys and values, or if they have 8 bits, of products with them.
            device: Their device.
            pack: Pack the pages of layers for which there are compiled kernels.
            states: The states of recurrent layers. If there are no other layers, pages hold nothing.
            quantised: Store keys and values in 8 bits with a scale each, in packed pages.
            row_dtype: The dtype of what is written, and of queries. None: `dtype`. Packed pages may be
                narrower.

        Raises:
            ValueError: A size is below 1, there are no layers, or no kernels for such pages of one.
        """
        kinds = len(layers) + (states is not None)
        for name, size in (("layers", kinds), ("num_pages", num_pages), ("page_size", page_size)):
            _check_size(name, size)
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.quantised = quantised
        self.device = torch.device(device)
        self.others: OtherRanks | None = None
        self.states = states
        # All tensors of one shape share one piece of memory, so that one operation copies a page in all of
        # them. If keys, values and layers have the same shape, that is the whole cache.
        shapes = Counter(shape for layer in layers for shape in layer.shapes)
        stored, more = (torch.int8, SCALE_BYTES) if quantised else (dtype, 0)
        self._pieces = {
            shape: huge_pages.empty(
                (count, num_pages, page_size, shape[0], shape[1] + more),
                stored,
                self.device,
                filled_from_start=count,
            )
            for shape, count in shapes.items()
        }  # [N, P, S, K, D] each, or [N, P, S, K, D + 4]
        unused = {shape: iter(piece) for shape, piece in self._pieces.items()}
        self._layers: list[tuple[Pages, Pages]] = []
        for layer in layers:
            keys, values = self._pages([next(unused[shape]) for shape in layer.shapes], pack=pack)
            takes = keys.row_dtypes if isinstance(keys, PackedKeys) else () if quantised else (dtype,)
            if (row_dtype or dtype) not in takes:
                rows = f"{row_dtype or dtype} on {self.device}"
                raise ValueError(f"there are no kernels for such pages of {layer} with {rows}")
            self._layers.append((keys, values))

    def _pages(self, pieces: Sequence[torch.Tensor], *, pack: bool) -> tuple[Pages, Pages]:
        """Pages of keys and values in these pieces of memory; the same, if there is one piece for both."""
        if not (pack and all(can_pack(piece, self.dtype) for piece in pieces)):
            return pieces[0], pieces[-1]
        keys = PackedKeys(pieces[0], self.dtype)
        return keys, PackedValues(pieces[1], self.dtype) if len(pieces) > 1 else keys

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: K and V of all layers, on all ranks."""
        own_bytes = self.page_bytes(
            self.layers, page_size=self.page_size, dtype=self.dtype, quantised=self.quantised
        )
        return own_bytes if self.others is None else own_bytes * self.others.ranks

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a recurrent state on all ranks; 0: there are none."""
        if self.states is None:
            return 0
        return self.states.bytes_per_state * (1 if self.others is None else self.others.ranks)

    @staticmethod
    def page_bytes(
        layers: Sequence[LayerKv], *, page_size: int, dtype: torch.dtype, quantised: bool = False
    ) -> int:
        """Bytes that one page of these layers takes: K and V of all of them."""
        element_bytes, more = (1, SCALE_BYTES) if quantised else (dtype.itemsize, 0)
        vectors = [shape for layer in layers for shape in layer.shapes]
        return page_size * sum(heads * (dim * element_bytes + more) for heads, dim in vectors)

    def layer(self, index: int) -> tuple[Pages, Pages]:
        """K and V of a layer, each [P, S, K, D]: contiguous tensors, or packed if the layer is.

        Writing to their `data` writes the cache. D is the layer's `key_dim` for K, and its
        `value_dim` for V. Values that are in keys are the keys' tensor.
        """
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
            for piece in self._pieces.values():
                piece.index_copy_(1, destination, piece.index_select(1, source))
        if self.others is not None:
            self.others.copy_pages(pairs)

    def stored_views(self, digest: bytes, number: int) -> list[memoryview]:
        """The bytes of what has this digest, on the CPU: of a page, or of a slot for recurrent states."""
        if self.states is not None and is_state(digest):
            return self.states.slot_views(number)
        return self.page_views(number)

    def page_views(self, page: int) -> list[memoryview]:
        """The bytes of a page on the CPU, as they are in memory: one piece for K and one for V of each layer.

        Writing to them writes the page. The order is the same for all pages of the same `layers`.
        """
        return [memoryview(one) for piece in self._page_bytes for one in piece[:, page]]

    @cached_property
    def _page_bytes(self) -> list[NDArray[np.uint8]]:
        # [N, P, bytes of a page] each
        plain = (piece.view(torch.uint8).numpy() for piece in self._pieces.values())
        return [piece.reshape(*piece.shape[:2], -1) for piece in plain]

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of single tokens, in every layer.

        Mutates the destination slots. All sources are read before any destination is written.

        Args:
            pairs: (source, destination) slots, page * page_size + offset. A destination occurs once.

        Raises:
            ValueError: A slot is out of range.
        """
        if not pairs:
            return
        for slot in (slot for pair in pairs for slot in pair):
            if not 0 <= slot < self.num_pages * self.page_size:
                raise ValueError(
                    f"pairs: slot must be in 0..{self.num_pages * self.page_size - 1}, got {slot}"
                )
        source = torch.tensor([pair[0] for pair in pairs], device=self.device)
        destination = torch.tensor([pair[1] for pair in pairs], device=self.device)
        each = {id(pages): pages for layer in self._layers for pages in layer}.values()
        packed = [pages for pages in each if not isinstance(pages, torch.Tensor)]
        for pages in packed:
            pages.move(source, destination)
        plain = [pages for pages in each if isinstance(pages, torch.Tensor)]  # [.., P, S, K, D] each
        if not packed:
            plain = list(self._pieces.values())
        for some in plain:
            slots = some.flatten(-4, -3)  # [.., P * S, K, D]
            slots.index_copy_(-3, destination, slots.index_select(-3, source))
        if self.others is not None:
            self.others.move_slots(pairs)


def _check_size(name: str, size: int) -> None:
    """Raises ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"{name}: must be at least 1, got {size}")
