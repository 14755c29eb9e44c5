"""QK-norm, rotation and KV write: the operations between the fused q, k and v projection and attention.

Each query and key head is RMS-normalised (in models with QK-norm) and rotated by its token's position: the
whole head, its first elements, or nothing in a layer without rotary embedding. Keys and values are written to
the token's slot. Results are rounded as if the three operations ran one after the other: the normalised head
as in `kernels.rms_norm`, the rotated one once.

Dimension letters: T tokens; H query heads; K key-value heads; D head width; R rotated elements of a head;
P pages; S tokens per page.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_pages, check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers
from kernels.packed_pages import PackedKeys, PackedValues, Pages
from kernels.rms_norm import check_norm_weight, rms_norm_reference
from kernels.rope import apply_rope_reference

_TYPES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class _Arguments(ctypes.Structure):
    """RopeArguments of rope_kv_write.h: the fields must agree."""

    _fields_ = (
        *pointers("query qkv qk_norm cos_sin slots k_pages v_pages"),
        *integers("tokens heads kv_heads width rotary_dim qkv_stride cos_sin_stride"),
        *integers("wide_norm is_quantised is_wide"),
        *doubles("eps"),
    )


def rope_kv_write_reference(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The three operations in plain torch; see `rope_kv_write`."""
    kv_heads, width = k_pages.shape[2:]
    by_head = qkv.view(len(qkv), qkv.shape[1] // width, width)  # [T, H + 2 * K, D]
    # Query and key heads are adjacent, and are normalised and rotated together.
    rotated, value = by_head[:, :-kv_heads], by_head[:, -kv_heads:]
    if qk_norm is not None:
        rotated = rms_norm_reference(rotated, qk_norm, eps)
    if cos_sin is not None:
        rotated = apply_rope_reference(rotated, cos_sin)  # [T, H + K, D]
    used = slots >= 0  # [T]
    # A slot is a row of the concatenated pages.
    for pages, rows in ((k_pages, rotated[:, -kv_heads:]), (v_pages, value)):
        pages.flatten(0, 1).index_copy_(0, slots[used].long(), rows[used])  # [P * S, K, D]
    return rotated[:, :-kv_heads]


def rope_kv_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: Pages,
    v_pages: Pages,
    eps: float,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write keys and values to their slots.

    Mutates only these slots of `k_pages` and `v_pages`. Two tokens must not have the same slot.

    Args:
        qkv: [T, (H + 2 * K) * D], the query heads, then the key heads, then the value heads; float32,
            bfloat16 or float16.
        qk_norm: [H + K, D], the norm weight of each query and key head, over the whole head; dtype of qkv, or
            float32. None: they are not normalised.
        cos_sin: [T, R] float32, the rows of `rope_table` at the positions of the tokens, R even and at most
            D: the first R elements of each head are rotated. None: no head is rotated.
        slots: [T] int32 or int64, page * S + offset; negative for a padding token, which is not written.
        k_pages: [P, S, K, D] contiguous, of the dtype of qkv; or packed, which takes it.
        v_pages: [P, S, K, D], packed if the keys are; their dtype.
        eps: Added to the mean square; positive.

    Returns:
        The queries [T, H, D], heads contiguous.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError, RuntimeError: A slot is beyond the last page (on the CPU).
    """
    kv_heads, width = k_pages.shape[2:]
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES)
    tokens, columns = qkv.shape
    heads = columns // width - 2 * kv_heads
    if columns % width or heads < 1 or heads % kv_heads:
        raise ValueError(f"qkv: {columns} columns are not the heads of {kv_heads} key-value heads of {width}")
    if qk_norm is not None:
        check_tensor("qk_norm", qk_norm, (heads + kv_heads, width), FLOAT_DTYPES)
        check_norm_weight("qk_norm", qk_norm, "qkv", qkv)
    if cos_sin is not None:
        check_tensor("cos_sin", cos_sin, (tokens, None), (torch.float32,))
        turned = cos_sin.shape[1]
        if turned % 2 or not 0 < turned <= width:
            raise ValueError(f"cos_sin: width must be even and at most the head's, {width}, got {turned}")
    check_tensor("slots", slots, (tokens,), INDEX_DTYPES)
    check_pages(k_pages, v_pages, kv_heads, width, "qkv", qkv)
    if isinstance(k_pages, PackedKeys) and isinstance(v_pages, PackedValues):
        return _compiled(qkv, qk_norm, cos_sin, slots, k_pages, v_pages, eps)
    assert isinstance(k_pages, torch.Tensor) and isinstance(v_pages, torch.Tensor)
    if qkv.is_cuda:
        from kernels.cuda import rope_kv_write as cuda

        return cuda.rope_kv_write(qkv, qk_norm, cos_sin, slots, k_pages, v_pages, eps)
    return rope_kv_write_reference(qkv, qk_norm, cos_sin, slots, k_pages, v_pages, eps)


def _compiled(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: PackedKeys,
    v_pages: PackedValues,
    eps: float,
) -> torch.Tensor:
    """`rope_kv_write` to packed pages. Raises IndexError for a slot beyond them, and writes nothing then."""
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
