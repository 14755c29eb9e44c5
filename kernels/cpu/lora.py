"""Calls the compiled low-rank adapters in lora.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import copied_rows
from kernels.weight import Weight

# kLoraRows, kLoraParts and kLoraRanks of lora.h.
_ROWS, _PARTS, _RANKS = 256, 6, 1536


class _Pairs(ctypes.Structure):
    """LoraPairs of lora.h: the fields must agree."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p * _PARTS),
        ("ranks", ctypes.c_int64 * _PARTS),
    )


class _Table(ctypes.Structure):
    """LoraTable of lora.h: the fields must agree."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("outputs", ctypes.c_int64 * _PARTS),
    )


class _Arguments(ctypes.Structure):
    """The struct of the same name in lora.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("y", "x", "table", "slots", "inner", "inner_copies")),
        ("x_copies", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "x_stride", "threads")),
    )


class Table:
    """Addresses of the packed matrices in each slot of a projection. Does not keep them alive.

    Attributes:
        address: That of LoraTable in lora.h. It stays, and so do those of its slots.
    """

    def __init__(self, slots: int, outputs: Sequence[int]) -> None:
        """Make empty slots for a projection."""
        self._slots = (_Pairs * slots)()
        self._table = _Table(ctypes.addressof(self._slots), slots, tuple(outputs))
        self.address = ctypes.addressof(self._table)

    def set(
        self,
        slot: int,
        a: Weight | None,
        b: Sequence[Weight | None] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        """Replace what is in a slot; without `a` it is empty. See `kernels.lora_pairs.LoraPairs`."""
        addresses = [None if each is None else each.data.data_ptr() for each in b]
        self._slots[slot] = _Pairs(None if a is None else a.data.data_ptr(), tuple(addresses), tuple(ranks))


def add_lora(y: torch.Tensor, x: torch.Tensor, table: Table, slots: torch.Tensor) -> None:
    """See `kernels.lora.add_lora`, which checks the arguments.

    Raises:
        IndexError: There is no such slot.
    """
    rows, inputs = x.shape
    held = min(rows, _ROWS)
    inner = torch.empty(held, _RANKS, dtype=x.dtype)
    copies = copied_rows(x.dtype, held, _RANKS), copied_rows(x.dtype, held, inputs)
    slots = slots.contiguous()
    arguments = _Arguments(
        y.data_ptr(),
        x.data_ptr(),
        table.address,
        slots.data_ptr(),
        inner.data_ptr(),
        *(None if copy is None else copy.data_ptr() for copy in copies),
        rows,
        inputs,
        x.stride(0),
        torch.get_num_threads(),
    )
    run = library.function(f"quire_lora_{SUFFIXES[x.dtype]}", (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError("slots: there is no such slot")
