"""QK-norm, rotation and KV write in one kernel, with the roundings of `kernels.rope_kv_write`.

A program takes one token and either B of its query and key heads, side by side, or some of its values. Heads
are held as two tiles, the first halves and the second: the rotation pairs element i of one with that of the
other.

Dimension letters: T tokens; H query heads; K key-value heads; D head width; F half of it; E the next power of
two; B heads of a program; P pages; S tokens a page.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.compile_spec import CompileSpec, Variant

# Elements of one half in a program, and of values: loads of 16 bytes a thread in half precision.
HALF_ELEMENTS = 1024
VALUE_ELEMENTS = 1024


@triton.jit
def weighted(half, inverse, weight):
    """One half, normalised: rounded before the weight and after it. [B, E] in the dtype of half."""
    unit = (half.to(tl.float32) * inverse[:, None]).to(half.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(half.dtype)


@triton.jit
def rope_kv_write_kernel(
    query,  # [T, H, D] contiguous, written
    qkv,  # [T, (H + 2 * K) * D]
    qk_norm,  # [H + K, D] contiguous; not read without NORM
    cos_sin,  # [T, D] float32
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
    E: tl.constexpr,
    B: tl.constexpr,
    VALUES: tl.constexpr,  # elements of the values of a program
):
    """Heads of one token: the first programs of a token rotate, the others copy values."""
    rotating: tl.constexpr = (HEADS + KV_HEADS + B - 1) // B
    copying: tl.constexpr = (KV_HEADS * D + VALUES - 1) // VALUES
    half: tl.constexpr = D // 2  # F
    # Programs of a token follow one another; a grid of one dimension has no limit on T.
    token = (tl.program_id(0) // (rotating + copying)).to(tl.int64)
    block = tl.program_id(0) % (rotating + copying)
    slot = tl.load(slots + token).to(tl.int64)
    row = qkv + token * qkv_stride

    if block < rotating:
        head = (block * B + tl.arange(0, B))[:, None]  # [B, 1]
        pair = tl.arange(0, E)[None, :]  # [1, E]
        mask = (head < HEADS + KV_HEADS) & (pair < half)  # [B, E]
        offsets = head * D + pair
        first = tl.load(row + offsets, mask=mask, other=0.0)
        second = tl.load(row + offsets + half, mask=mask, other=0.0)
        if NORM:
            a, b = first.to(tl.float32), second.to(tl.float32)
            inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)  # [B]
            first = weighted(first, inverse, tl.load(qk_norm + offsets, mask=mask, other=0.0))
            second = weighted(second, inverse, tl.load(qk_norm + offsets + half, mask=mask, other=0.0))
        angles = cos_sin + token * cos_sin_stride + pair
        cos = tl.load(angles, mask=pair < half, other=0.0)  # [1, E]
        sin = tl.load(angles + half, mask=pair < half, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        turned_first = (a * cos - b * sin).to(first.dtype)  # [B, E]
        turned_second = (b * cos + a * sin).to(first.dtype)

        is_query = mask & (head < HEADS)
        written = query + token * (HEADS * D) + offsets
        tl.store(written, turned_first, mask=is_query)
        tl.store(written + half, turned_second, mask=is_query)
        is_key = mask & (head >= HEADS) & (slot >= 0)
        written = k_pages + slot * (KV_HEADS * D) + (offsets - HEADS * D)
        tl.store(written, turned_first, mask=is_key)
        tl.store(written + half, turned_second, mask=is_key)
    else:
        # Values of a token are contiguous on both sides.
        element = (block - rotating) * VALUES + tl.arange(0, VALUES)  # [VALUES]
        is_value = (element < KV_HEADS * D) & (slot >= 0)
        value = tl.load(row + (HEADS + KV_HEADS) * D + element, mask=is_value)
        tl.store(v_pages + slot * (KV_HEADS * D) + element, value, mask=is_value)


@cache
def _variant(heads: int, kv_heads: int, width: int, *, norm: bool) -> Variant:
    padded = triton.next_power_of_2(width // 2)
    block = min(max(1, HALF_ELEMENTS // padded), triton.next_power_of_2(heads + kv_heads))
    values = min(VALUE_ELEMENTS, triton.next_power_of_2(kv_heads * width))
    constexprs = {
        "NORM": norm,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": width,
        "E": padded,
        "B": block,
        "VALUES": values,
    }
    return Variant(rope_kv_write_kernel, constexprs, num_warps=4, num_stages=1)


def rope_kv_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launch `rope_kv_write_kernel`; see `kernels.rope_kv_write.rope_kv_write`. Arguments are checked.

    Mutates the named slots of `k_pages` and `v_pages`. Returns a new contiguous tensor [T, H, D]; the query
    of a padded token is computed from what its row holds.
    """
    kv_heads, width = k_pages.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    if query.numel() == 0:
        return query
    variant = _variant(heads, kv_heads, width, norm=qk_norm is not None)
    rotating = triton.cdiv(heads + kv_heads, variant.constexprs["B"])
    copying = triton.cdiv(kv_heads * width, variant.constexprs["VALUES"])
    variant.launch(
        (len(qkv) * (rotating + copying),),
        query,
        qkv,
        qkv if qk_norm is None else qk_norm.contiguous(),
        cos_sin,
        slots,
        k_pages,
        v_pages,
        qkv.stride(0),
        cos_sin.stride(0),
        eps,
    )
    return query


def compile_specs() -> list[CompileSpec]:
    """Every head width in bfloat16, with the norm in models of that width; the other dtypes once."""
    shapes = (
        ("bf16", 32, 8, 64, False),
        ("bf16", 32, 32, 80, False),
        ("bf16", 32, 32, 96, False),
        ("bf16", 16, 8, 128, True),
        ("bf16", 8, 4, 256, True),
        ("fp16", 32, 8, 128, False),
        ("fp32", 16, 8, 128, True),
    )
    return [_spec(*shape) for shape in shapes]


def _spec(dtype: str, heads: int, kv_heads: int, width: int, norm: bool) -> CompileSpec:
    pointers = ("query", "qkv", "qk_norm", "k_pages", "v_pages")
    types = dict.fromkeys(pointers, f"*{dtype}") | {
        "cos_sin": "*fp32",
        "slots": "*i64",
        "qkv_stride": "i32",
        "cos_sin_stride": "i32",
        "eps": "fp32",
    }
    return CompileSpec(
        _variant(heads, kv_heads, width, norm=norm),
        f"rope_kv_write {dtype} H={heads} K={kv_heads} D={width}" + (" norm" if norm else ""),
        types,
        divisible_by_16=tuple(name for name in types if name != "eps"),
    )
