"""QK-norm, rotation and KV write in one kernel, with the roundings of `kernels.rope_kv_write`.

A program processes B consecutive query and key heads of one token, or copies some of its values. Heads are in
two tiles, the first and the second half of the rotated elements, since the rotation pairs element i of one
half with element i of the other. Elements that are not rotated are in a third tile. Launches begin early
(`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; H query heads; K key-value heads; D head width; R rotated elements of a head; F
half of them; E the next power of two; W the power of two not below D - R; B heads of a program; P pages; S
tokens a page.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant

# Elements of one half, and of values, in a program: in half precision, each thread loads 16 bytes.
HALF_ELEMENTS = 1024
VALUE_ELEMENTS = 1024


@triton.jit
def squares(part):
    """The sum of the squares of each head's part: [B, E] -> [B] float32."""
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def weighted(part, inverse, weight):
    """The normalised part [B, E], rounded to the dtype of the weight, times the weight."""
    unit = (part.to(tl.float32) * inverse[:, None]).to(weight.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(part.dtype)


@triton.jit
def turn_heads(
    queries,  # [H, D] of the token, written
    k_pages,
    row,  # of qkv
    qk_norm,
    cos_sin,  # [R] of the token
    slot,  # of the token
    block,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
):
    """Normalise, rotate and store B query and key heads of one token."""
    half: tl.constexpr = R // 2  # F
    head = (block * B + tl.arange(0, B))[:, None]  # [B, 1]
    is_head = head < HEADS + KV_HEADS
    pair = tl.arange(0, E)[None, :]  # [1, E]
    column = R + tl.arange(0, W)[None, :]  # [1, W]
    turned, kept = head * D + pair, head * D + column
    is_turned, is_kept = is_head & (pair < half), is_head & (column < D)
    nothing = tl.zeros([B, 1], tl.float32)
    first, second, rest = nothing, nothing, nothing  # unless there are such elements
    total = tl.zeros([B], tl.float32)
    if R > 0:
        first = tl.load(row + turned, mask=is_turned, other=0.0)  # [B, E]
        second = tl.load(row + turned + half, mask=is_turned, other=0.0)
        total = squares(first) + squares(second)
    if R < D:
        rest = tl.load(row + kept, mask=is_kept, other=0.0)  # [B, W]
        total += squares(rest)
    inverse = tl.rsqrt(total / D + eps)  # [B]; not used without NORM
    if R > 0:
        if NORM:
            scale = tl.load(qk_norm + turned, mask=is_turned, other=0.0)
            first = weighted(first, inverse, scale)
            scale = tl.load(qk_norm + turned + half, mask=is_turned, other=0.0)
            second = weighted(second, inverse, scale)
        angles = cos_sin + pair
        cos = tl.load(angles, mask=pair < half, other=0.0)  # [1, E]
        sin = tl.load(angles + half, mask=pair < half, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        turned_first = (a * cos - b * sin).to(first.dtype)
        turned_second = (b * cos + a * sin).to(first.dtype)
        is_query = is_turned & (head < HEADS)
        tl.store(queries + turned, turned_first, mask=is_query)
        tl.store(queries + turned + half, turned_second, mask=is_query)
        is_key = is_turned & (head >= HEADS) & (slot >= 0)
        keys = k_pages + slot * (KV_HEADS * D)
        tl.store(keys + (turned - HEADS * D), turned_first, mask=is_key)
        tl.store(keys + (turned - HEADS * D) + half, turned_second, mask=is_key)
    if R < D:
        if NORM:
            rest = weighted(rest, inverse, tl.load(qk_norm + kept, mask=is_kept, other=0.0))
        tl.store(queries + kept, rest, mask=is_kept & (head < HEADS))
        keys = k_pages + slot * (KV_HEADS * D)
        tl.store(keys + (kept - HEADS * D), rest, mask=is_kept & (head >= HEADS) & (slot >= 0))


@triton.jit
def rope_kv_write_kernel(
    query,  # [T, H, D] contiguous, written
    qkv,  # [T, (H + 2 * K) * D]
    qk_norm,  # [H + K, D] contiguous; not read without NORM
    cos_sin,  # [T, R] float32; not read where R is 0
    slots,  # [T]
    k_pages,  # [P, S, K, D] contiguous, written
    v_pages,  # [P, S, K, D] contiguous, written
    qkv_stride,
    cos_sin_stride,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,  # H
    KV_HEADS: tl.constexpr,  # K
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    B: tl.constexpr,
    VALUES: tl.constexpr,  # elements of the values of a program
    EARLY: tl.constexpr,
):
    """Some heads of one token: the first programs of a token rotate heads, the others copy values."""
    wait(EARLY)
    rotating: tl.constexpr = (HEADS + KV_HEADS + B - 1) // B
    copying: tl.constexpr = (KV_HEADS * D + VALUES - 1) // VALUES
    # The programs of a token have consecutive numbers. With one dimension, the grid has no limit on T.
    token = (tl.program_id(0) // (rotating + copying)).to(tl.int64)
    block = tl.program_id(0) % (rotating + copying)
    slot = tl.load(slots + token).to(tl.int64)
    row = qkv + token * qkv_stride

    if block < rotating:
        queries = query + token * (HEADS * D)
        angles = cos_sin + token * cos_sin_stride
        turn_heads(
            queries, k_pages, row, qk_norm, angles, slot, block, eps, NORM, HEADS, KV_HEADS, D, R, E, W, B
        )
    else:
        # Values of a token are contiguous on both sides.
        element = (block - rotating) * VALUES + tl.arange(0, VALUES)  # [VALUES]
        is_value = (element < KV_HEADS * D) & (slot >= 0)
        value = tl.load(row + (HEADS + KV_HEADS) * D + element, mask=is_value)
        tl.store(v_pages + slot * (KV_HEADS * D) + element, value, mask=is_value)


@cache
def _variant(heads: int, kv_heads: int, width: int, turned: int, *, norm: bool) -> Variant:
    # An unused tile has one column.
    padded, rest = triton.next_power_of_2(max(1, turned // 2)), triton.next_power_of_2(max(1, width - turned))
    block = min(max(1, HALF_ELEMENTS // max(padded, rest)), triton.next_power_of_2(heads + kv_heads))
    values = min(VALUE_ELEMENTS, triton.next_power_of_2(kv_heads * width))
    constexprs = {
        "NORM": norm,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": width,
        "R": turned,
        "E": padded,
        "W": rest,
        "B": block,
        "VALUES": values,
    }
    return Variant(rope_kv_write_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def rope_kv_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launch `rope_kv_write_kernel`; see `kernels.rope_kv_write.rope_kv_write`. Arguments are checked.

    Mutates only these slots of `k_pages` and `v_pages`. Returns a new contiguous tensor [T, H, D]; the query
    of a padding token is computed from whatever its row contains.
    """
    kv_heads, width = k_pages.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    if query.numel() == 0:
        return query
    turned = 0 if cos_sin is None else cos_sin.shape[1]
    variant = _variant(heads, kv_heads, width, turned, norm=qk_norm is not None)
    rotating = triton.cdiv(heads + kv_heads, variant.constexprs["B"])
    copying = triton.cdiv(kv_heads * width, variant.constexprs["VALUES"])
    variant.launch(
        (len(qkv) * (rotating + copying),),
        query,
        qkv,
        qkv if qk_norm is None else qk_norm.contiguous(),
        qkv if cos_sin is None else cos_sin,
        slots,
        k_pages,
        v_pages,
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        eps,
    )
    return query
