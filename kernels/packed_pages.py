"""Pages of keys and values in the layout of the compiled attention of the CPU: see kernels/cpu/kv_pages.h.

Dimension letters: P pages; S tokens per page; K key-value heads; D width of a head; T slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES

# The tokens whose elements are interleaved, and the elements of a value that are together.
_PART = 16
# The bytes of the scale of a key or value in 8 bits, which follows its codes.
SCALE_BYTES = 4
_MAX_WIDTH = 576  # kMaxHeadWidth of kernels/cpu/vectors.h


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


def can_pack(pages: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether there are compiled kernels for pages like these, [P, S, K, D], or [P, S, K, D + 4] int8.

    dtype: for int8 that of the elements, else that of the pages.
    """
    is_quantised = pages.dtype is torch.int8
    return (
        pages.device.type == "cpu"
        and (pages.dtype if dtype is None else dtype) in SUFFIXES
        and (is_quantised or dtype in (None, pages.dtype))
        and pages.is_contiguous()
        and pages.shape[1] % _PART == 0
        and can_pack_width(pages.shape[3] - is_quantised * SCALE_BYTES)
        and library.available()
    )


class _PackedPages(ABC):
    """The keys or the values of all pages of a layer.

    Attributes:
        shape: [P, S, K, D].
        dtype: bfloat16 or float32: of the products with what is stored.
        row_dtypes: Of what may be written, and of queries: rounded if they are wider.
        device, stride, is_contiguous: Those of the data.
        is_quantised: Whether an element is a code of 8 bits, and each key or value has a scale in float32.
        data: [P, S, K, D] contiguous of the dtype, or [P, S, K, D + 4] int8; in an order of its own.
    """

    def __init__(self, data: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Take memory. Its contents stay as they are. `dtype`: see `can_pack`.

        Raises ValueError if there are no compiled kernels for such pages.
        """
        if not can_pack(data, dtype):
            raise ValueError(f"data: there are no kernels for {data.dtype} pages {list(data.shape)}")
        self.is_quantised = data.dtype is torch.int8
        self.shape = torch.Size((*data.shape[:3], data.shape[3] - self.is_quantised * SCALE_BYTES))
        self.dtype = data.dtype if dtype is None else dtype
        self.row_dtypes = (self.dtype, torch.float32) if self.dtype is torch.bfloat16 else (self.dtype,)
        self.data = data
        self.device = data.device
        self.stride, self.is_contiguous = data.stride, data.is_contiguous
        self._adjacent = 4 // data.element_size()

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots [T] int64, page * S + offset, to others. All are read before any is written."""
        for view, place in ((self._in_order(), self._place), (self._scales(), _by_token)):
            view[place(destination)] = view[place(source)]

    def dense(self, pages: torch.Tensor) -> torch.Tensor:
        """The keys or values of pages [n] in plain order: [n, S, K, D], a new tensor."""
        chosen = type(self)(self.data.index_select(0, pages), self.dtype)
        elements = chosen._in_order().reshape(chosen.shape)  # noqa: SLF001 - of its own class
        if not self.is_quantised:
            return elements
        scales = chosen._scales().reshape(*chosen.shape[:3], 1)  # noqa: SLF001
        return (elements * scales).to(self.dtype)

    def _parts(self) -> torch.Tensor:
        """What each head has of 16 tokens, [P * S / 16, K, 16 * D]."""
        kv_heads, width = self.shape[2:]
        return self.data.view(-1, kv_heads, _PART * self.data.shape[3])[..., : _PART * width]

    def _scales(self) -> torch.Tensor:
        """A view of the scales, [P * S / 16, 16, K]; without elements, if there are none."""
        kv_heads, width = self.shape[2:]
        if not self.is_quantised:
            return torch.empty(self.shape[0] * self.shape[1] // _PART, _PART, 0)
        behind = self.data.view(-1, kv_heads, _PART * self.data.shape[3])[..., _PART * width :]
        return behind.view(torch.float32).transpose(1, 2)

    @abstractmethod
    def _in_order(self) -> torch.Tensor:
        """A view with the tokens in the order of their slots, [P * S / 16, ..., K, D / n, n]."""

    @abstractmethod
    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The indices of tokens in that view."""


def _by_token(slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices of tokens in a view [P * S / 16, 16, ...]."""
    return slots // _PART, slots % _PART


class PackedKeys(_PackedPages):
    """Keys: of each head of 16 tokens [D / 2, 16, 2] in bfloat16, and [D, 16] in float32.

    In int8 [D / 4, 16, 4].
    """

    def _in_order(self) -> torch.Tensor:
        parts = self._parts()  # [P * S / 16, K, 16 * D]
        parts = parts.view(*parts.shape[:2], -1, _PART, self._adjacent)
        return parts.permute(0, 3, 1, 2, 4)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _by_token(slots)


class PackedValues(_PackedPages):
    """Values: of each head of 16 tokens [D / 16, 8, 16, 2] in bfloat16, [D / 16, 16, 16] in float32.

    In int8 [D / 16, 4, 16, 4].
    """

    def _in_order(self) -> torch.Tensor:
        parts = self._parts()  # [P * S / 16, K, 16 * D]
        parts = parts.view(*parts.shape[:2], -1, _PART // self._adjacent, _PART, self._adjacent)
        return parts.permute(0, 3, 5, 1, 2, 4)

    def _place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return slots // _PART, slots % _PART // self._adjacent, slots % self._adjacent


# What kernels take: plain tensors [P, S, K, D], or packed.
Pages: TypeAlias = torch.Tensor | PackedKeys | PackedValues


class LeadingValues:
    """Values that are the first elements of their keys, and have no memory of their own.

    Attributes:
        keys: [P, S, K, D], plain or packed.
        shape: [P, S, K, V].
    """

    def __init__(self, keys: torch.Tensor | PackedKeys, width: int) -> None:
        """`width`: V, at most D; a multiple of 16 if keys are packed."""
        self.keys = keys
        self.shape = torch.Size((*keys.shape[:3], width))
