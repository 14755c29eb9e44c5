"""Calls the compiled low-rank adapters in lora.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers
from kernels.cpu.linear import copied_rows
from kernels.lora_pairs import LoraPairs

# kLoraRows, kLoraParts and kLoraRanks of lora.h.
_ROWS, _PARTS, _RANKS = 256, 6, 1536


class _Pairs(ctypes.Structure):
    """LoraPairs of lora.h: the fields must agree."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p * _PARTS),
        ("ranks", ctypes.c_int64 * _PARTS),
        ("starts", ctypes.c_int64 * _PARTS),
        ("num_ranks", ctypes.c_int64),
        *pointers("scales shifts"),
    )


def _described(pairs: LoraPairs | None) -> _Pairs:
    """The addresses of packed matrices. Does not keep them alive."""
    if pairs is None:
        return _Pairs()
    b = tuple(None if each is None else each.data.data_ptr() for each in pairs.b)
    rescaling = (None if each is None else each.data_ptr() for each in (pairs.scales, pairs.shifts))
    return _Pairs(pairs.a.data.data_ptr(), b, pairs.ranks, pairs.starts, len(pairs.a), *rescaling)


class _Table(ctypes.Structure):
    """LoraTable of lora.h: the fields must agree."""

    _fields_ = (*pointers("slots"), *integers("num_slots"), ("outputs", ctypes.c_int64 * _PARTS))


class _Arguments(ctypes.Structure):
    """The struct of the same name in lora.cpp: the fields must agree."""

    _fields_ = (
        *pointers("y x table slots inner inner_copies x_copies"),
        *integers("rows inputs x_stride threads"),
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

    def set(self, slot: int, pairs: LoraPairs | None) -> None:
        """Replace what is in a slot; None: it is empty."""
        self._slots[slot] = _described(pairs)


class ExpertsLora(ctypes.Structure):
    """ExpertLora of experts.h: the fields must agree."""

    _fields_ = (*pointers("slots"), *integers("num_slots"))


class ExpertsTable:
    """As `Table`, for a projection of all experts of a layer.

    Attributes:
        described: What experts.h has.
    """

    def __init__(self, slots: int) -> None:
        """Make empty slots."""
        self._slots = (ctypes.c_void_p * slots)()
        self.described = ExpertsLora(ctypes.addressof(self._slots), slots)

    def set(self, slot: int, described: ctypes.Array[_Pairs] | None) -> None:
        """Replace what is in a slot; None: it is empty. Does not keep anything alive."""
        self._slots[slot] = None if described is None else ctypes.addressof(described)


def describe_experts(pairs: Sequence[LoraPairs | None]) -> ctypes.Array[_Pairs]:
    """What adapters of all experts are for `ExpertsTable`. Does not keep them alive."""
    return (_Pairs * len(pairs))(*map(_described, pairs))


class Scratch:
    """Memory for rows in between, as addresses: see LoraScratch of lora.h."""

    def __init__(self, dtype: torch.dtype, rows: int, inputs: int) -> None:
        """For so many rows, each of so many inputs."""
        held = min(rows, _ROWS)
        inner = torch.empty(held, _RANKS, dtype=dtype)
        self._memory = inner, copied_rows(dtype, held, _RANKS), copied_rows(dtype, held, inputs)
        self.addresses = [None if each is None else each.data_ptr() for each in self._memory]


def add_lora(y: torch.Tensor, x: torch.Tensor, table: Table, slots: torch.Tensor) -> None:
    """See `kernels.lora.add_lora`, which checks the arguments.

    Raises:
        IndexError: There is no such slot.
    """
    rows, inputs = x.shape
    scratch, slots = Scratch(x.dtype, rows, inputs), slots.contiguous()
    arguments = _Arguments(
        y.data_ptr(),
        x.data_ptr(),
        table.address,
        slots.data_ptr(),
        *scratch.addresses,
        rows,
        inputs,
        x.stride(0),
        torch.get_num_threads(),
    )
    run = library.function(f"quire_lora_{SUFFIXES[x.dtype]}", (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError("slots: there is no such slot")
