"""Calls the compiled QK-norm, rotation and KV write in rope_kv_write.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers
from kernels.packed_pages import PackedKeys, PackedValues

_TYPES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class _Arguments(ctypes.Structure):
    """RopeArguments of rope_kv_write.h: the fields must agree."""

    _fields_ = (
        *pointers("query qkv qk_norm cos_sin slots k_pages v_pages"),
        *integers("tokens heads kv_heads width rotary_dim qkv_stride cos_sin_stride"),
        *integers("wide_norm is_quantised is_wide"),
        *doubles("eps"),
    )


def rope_kv_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: PackedKeys,
    v_pages: PackedValues,
    eps: float,
) -> torch.Tensor:
    """See `kernels.rope_kv_write.rope_kv_write`, which checks the arguments.

    Raises IndexError for a slot beyond the last page, and writes nothing then.
    """
    tokens = qkv.shape[0]
    kv_heads, width = k_pages.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = torch.empty(tokens, heads, width, dtype=qkv.dtype)  # [T, H, D]
    # Variables keep the memory alive that the kernel reads.
    slots = slots.to(torch.int64).contiguous()
    qk_norm = None if qk_norm is None else qk_norm.contiguous()
    arguments = _Arguments(
        query.data_ptr(),
        qkv.data_ptr(),
        None if qk_norm is None else qk_norm.data_ptr(),
        None if cos_sin is None else cos_sin.data_ptr(),
        slots.data_ptr(),
        k_pages.data.data_ptr(),
        v_pages.data.data_ptr(),
        tokens,
        heads,
        kv_heads,
        width,
        0 if cos_sin is None else cos_sin.shape[1],
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        qk_norm is not None and qk_norm.dtype is torch.float32,
        k_pages.is_quantised,
        k_pages.dtype is not qkv.dtype,
        eps,
    )
    run = library.function(f"quire_rope_kv_write_{SUFFIXES[qkv.dtype]}", _TYPES, ctypes.c_bool)
    num_slots = k_pages.shape[0] * k_pages.shape[1]
    if not run(ctypes.addressof(arguments), num_slots, torch.get_num_threads()):
        raise IndexError("slots: a slot is beyond the last page")
    return query
