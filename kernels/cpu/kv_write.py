"""Calls the compiled KV write in kv_write.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.checks import check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.packed_pages import PackedKeys, PackedValues

_TYPES = (ctypes.c_void_p, ctypes.c_int64)


class _Arguments(ctypes.Structure):
    """Arguments of kv_write.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots", "k_pages", "v_pages")),
        *((name, ctypes.c_int64) for name in ("tokens", "kv_heads", "width", "value_width", "num_slots")),
        ("is_quantised", ctypes.c_int64),
    )


def kv_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_pages: PackedKeys,
    v_pages: PackedValues,
    slots: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot. Nothing is written if an argument is wrong.

    Args:
        keys: [T, K, D]; dtype of the pages.
        values: [T, K, V]; dtype of the pages.
        k_pages: [P, S, K, D], mutated.
        v_pages: [P, S, K, V], mutated.
        slots: [T] int32 or int64, page * S + offset; negative for a padding token, which is not written.

    Raises:
        ValueError, TypeError: A shape or a dtype differs; the message names the argument.
        IndexError: A slot is beyond the last page.
    """
    for name, rows, pages in (("keys", keys, k_pages), ("values", values, v_pages)):
        check_tensor(name, rows, (*slots.shape, *pages.shape[2:]), (pages.dtype,))
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"v_pages: {list(v_pages.shape)} do not belong to keys {list(k_pages.shape)}")
    # Variables keep the memory alive that the kernel reads.
    keys, values, slots = keys.contiguous(), values.contiguous(), slots.to(torch.int64).contiguous()
    arguments = _Arguments(
        keys.data_ptr(),
        values.data_ptr(),
        slots.data_ptr(),
        k_pages.data.data_ptr(),
        v_pages.data.data_ptr(),
        *keys.shape,
        values.shape[2],
        k_pages.shape[0] * k_pages.shape[1],
        k_pages.is_quantised,
    )
    run = library.function(f"quire_kv_write_{SUFFIXES[keys.dtype]}", _TYPES, ctypes.c_bool)
    if not run(ctypes.addressof(arguments), torch.get_num_threads()):
        raise IndexError("slots: a slot is beyond the last page")
