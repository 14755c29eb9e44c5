"""Pages of keys and values in the layout of the compiled attention of the CPU: see kernels/cpu/kv_pages.h.

Dimension letters: P pages; S tokens per page; K key-value heads; D width of a head; T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES

# The tokens whose elements are interleaved, and the elements of a value that are together.
_PART = 16
_MAX_WIDTH = 256  # kMaxHeadWidth of kernels/cpu/vectors.h


def can_pack_width(width: int) -> bool:
    """Whether there are compiled kernels for heads of this width, if there are any."""
    return width % _PART == 0 and width <= _MAX_WIDTH


def packed_width(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """How wide pages for heads of this width have to be, so that there are compiled kernels for them.

    The width itself, if there are some, or none at any width. Else the rest of a head has to be zeros.
    """
    filled_up = -(-width // _PART) * _PART
    is_possible = device.type == "cpu" and dtype in SUFFIXES and filled_up <= _MAX_WIDTH
    return filled_up if is_possible and library.available() else width


def can_pack(pages: torch.Tensor) -> bool:
    """Whether there are compiled kernels for pages like these, [P, S, K, D]."""
    return (
        pages.device.type == "cpu"
        and pages.dtype in SUFFIXES
        and pages.is_contiguous()
        and pages.shape[1] % _PART == 0
        and can_pack_width(pages.shape[3])
        and library.available()
    )


class _PackedPages(ABC):
    """The keys or the values of all pages of a layer.

    Attributes:
        shape: [P, S, K, D].
        dtype: bfloat16 or float32.
        data: [P, S, K, D] contiguous; its elements are in an order of their own.
    """

    def __init__(self, data: torch.Tensor) -> None:
        """Take memory. Its contents stay as they are.

        Raises:
            ValueError: There are no compiled kernels for such pages: see `can_pack`.
        """
        if not can_pack(data):
            raise ValueError(f"data: there are no kernels for {data.dtype} pages {list(data.shape)}")
        self.shape = data.shape
        self.dtype = data.dtype
        self.data = data
        self._adjacent = 4 // data.element_size()

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """The keys or values of existing slots [T] int64, page * S + offset: [T, K, D], a new tensor."""
        return self._in_order()[self._place(slots)].flatten(2)

    def dense(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys or values of pages [n] in plain order: [n, S, K, D], a new tensor."""
        chosen = type(self)(self.data.index_select(0, pages))
        return chosen._in_order().reshape(chosen.shape)  # noqa: SLF001 - of its own class

    @abstractmethod
    def _in_order(self) -> torch.Tensor:
        """A view with the tokens in the order of their slots, [P * S / 16, ..., K, D / n, n]."""

    @abstractmethod
    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The indices of tokens in that view."""


class PackedKeys(_PackedPages):
    """Keys: of each head of 16 tokens [D / 2, 16, 2] in bfloat16, and [D, 16] in float32."""

    def _in_order(self) -> torch.Tensor:
        parts = self.data.view(-1, self.shape[2], self.shape[3] // self._adjacent, _PART, self._adjacent)
        return parts.permute(0, 3, 1, 2, 4)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return slots // _PART, slots % _PART


class PackedValues(_PackedPages):
    """Values: of each head of 16 tokens [D / 16, 8, 16, 2] in bfloat16, and [D / 16, 16, 16] in float32."""

    def _in_order(self) -> torch.Tensor:
        of_tokens = _PART // self._adjacent, _PART, self._adjacent
        parts = self.data.view(-1, self.shape[2], self.shape[3] // _PART, *of_tokens)
        return parts.permute(0, 3, 5, 1, 2, 4)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return slots // _PART, slots % _PART // self._adjacent, slots % self._adjacent


# What kernels take: plain tensors [P, S, K, D], or packed.
Pages: TypeAlias = torch.Tensor | PackedKeys | PackedValues
