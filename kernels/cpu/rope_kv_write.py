"""Calls the compiled QK-norm, rotation and KV write in rope_kv_write.cpp."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu import library

_ENTRY_POINTS = {torch.bfloat16: "quire_rope_kv_write_bf16", torch.float32: "quire_rope_kv_write_f32"}
_FLOAT32_NORM = "quire_rope_kv_write_bf16_f32"  # with projections in bfloat16
_MAX_WIDTH = 256


class _Arguments(ctypes.Structure):
    """The struct of the same name in rope_kv_write.cpp: the fields must agree."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "qkv", "qk_norm", "cos_sin", "slots", "k_pages", "v_pages")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("tokens", "heads", "kv_heads", "width", "rotary_dim", "num_slots")
        ),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "cos_sin_stride", "threads")),
        ("eps", ctypes.c_double),
    )


def can_rope_kv_write(qkv: torch.Tensor, k_pages: torch.Tensor) -> bool:
    """Whether the kernel is available and supports these shapes, device and dtype."""
    return (
        qkv.device.type == "cpu"
        and qkv.dtype in _ENTRY_POINTS
        and k_pages.shape[3] <= _MAX_WIDTH
        and library.available()
    )


def rope_kv_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `kernels.rope_kv_write.rope_kv_write`, which checks the arguments. Requires `can_rope_kv_write`.

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
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        tokens,
        heads,
        kv_heads,
        width,
        0 if cos_sin is None else cos_sin.shape[1],
        k_pages.shape[0] * k_pages.shape[1],
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        torch.get_num_threads(),
        eps,
    )
    same = qk_norm is None or qk_norm.dtype is qkv.dtype
    entry_point = _ENTRY_POINTS[qkv.dtype] if same else _FLOAT32_NORM
    entry = library.function(entry_point, (ctypes.c_void_p,), ctypes.c_bool)
    if not entry(ctypes.addressof(arguments)):
        raise IndexError("slots: a slot is beyond the last page")
    return query
