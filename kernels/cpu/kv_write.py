"""Calls the compiled KV write in kv_write.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.checks import check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers
from kernels.packed_pages import PackedKeys, PackedValues

_TYPES = (ctypes.c_void_p, ctypes.c_int64)


class _Arguments(ctypes.Structure):
    """Arguments of kv_write.cpp: the fields must agree."""

    _fields_ = (
        *pointers("keys values slots k_pages v_pages"),
        *integers("tokens kv_heads width value_width num_slots is_quantised is_wide"),
    )


def kv_write(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    k_pages: PackedKeys,
    v_pages: PackedValues | None,
    slots: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot. Nothing is written if an argument is wrong.

    Args:
        keys: [T, K, D]; of a dtype that the pages take.
        values: [T, K, V]; dtype of keys. None: they are a part of keys, and have no pages.
        k_pages: [P, S, K, D], mutated.
        v_pages: [P, S, K, V], mutated. None if `values` are.
        slots: [T] int32 or int64, page * S + offset; negative for a padding token, which is not written.

    Raises:
        ValueError, TypeError: A shape or a dtype differs; the message names the argument.
        IndexError: A slot is beyond the last page.
    """
    check_tensor("keys", keys, (*slots.shape, *k_pages.shape[2:]), k_pages.row_dtypes)
    if values is not None:
        assert v_pages is not None, "values have pages"
        check_tensor("values", values, (*slots.shape, *v_pages.shape[2:]), v_pages.row_dtypes)
        if keys.dtype != values.dtype:
            raise TypeError(f"values: must have the dtype of keys, {keys.dtype}, got {values.dtype}")
        if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.dtype != v_pages.dtype:
            raise ValueError(f"v_pages: {list(v_pages.shape)} do not belong to keys {list(k_pages.shape)}")
        values = values.contiguous()
    # Variables keep the memory alive that the kernel reads.
    keys, slots = keys.contiguous(), slots.to(torch.int64).contiguous()
    arguments = _Arguments(
        keys.data_ptr(),
        None if values is None else values.data_ptr(),
        slots.data_ptr(),
        k_pages.data.data_ptr(),
        None if v_pages is None else v_pages.data.data_ptr(),
        *keys.shape,
        0 if values is None else values.shape[2],
        k_pages.shape[0] * k_pages.shape[1],
        k_pages.is_quantised,
        k_pages.dtype is not keys.dtype,
    )
    run = library.function(f"quire_kv_write_{SUFFIXES[keys.dtype]}", _TYPES, ctypes.c_bool)
    if not run(ctypes.addressof(arguments), torch.get_num_threads()):
        raise IndexError("slots: a slot is beyond the last page")
