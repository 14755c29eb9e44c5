"""Norm, rotation and KV write of latent attention in one kernel: see `kernels.latent_rope_kv_write`.

Programs of a token have consecutive numbers. The first normalises its latent, rotates its key and writes both
to their slot; each of the others rotates B query heads. Launches begin early
(`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; H query heads; L width of the latent, F the power of two not below it; R width of
what is rotated, E the power of two not below half of it; Q width of a query before the product with keys; B
heads of a program; P pages; S tokens a page; D width of a key in pages.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.rope_kv_write import HALF_ELEMENTS, squares, weighted
from kernels.cuda.variant import Variant


@triton.jit
def turn(
    to,  # pointers to the first element of each result, [B, 1]
    source,  # the same of what is rotated
    is_head,  # [B, 1]
    cos_sin,  # of the token, or None
    R: tl.constexpr,
    E: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate R elements of B heads."""
    half: tl.constexpr = R // 2
    pair = tl.arange(0, E)[None, :]  # [1, E]
    mask = is_head & (pair < half)
    # Without a rotation elements keep their places.
    adjacent: tl.constexpr = INTERLEAVED and cos_sin is not None
    first = tl.load(source + pair * (2 if adjacent else 1), mask=mask, other=0.0)  # [B, E]
    second = tl.load(source + (pair * 2 + 1 if adjacent else pair + half), mask=mask, other=0.0)
    if cos_sin is not None:
        cos = tl.load(cos_sin + pair, mask=pair < half, other=0.0)  # [1, E]
        sin = tl.load(cos_sin + half + pair, mask=pair < half, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
    tl.store(to + pair, first, mask=mask)
    tl.store(to + half + pair, second, mask=mask)


@triton.jit
def latent_rope_kv_write_kernel(
    pages,  # [P, S, 1, D] contiguous, written
    query,  # [T, H, D] contiguous, of whose heads L.. L + R - 1 are written
    rows,  # [T, L + R]
    queries,  # [T, H, Q]
    norm,  # [L]
    cos_sin,  # [T, R] float32, or None
    slots,  # [T]
    rows_stride,
    queries_stride,
    cos_sin_stride,
    eps,
    HEADS: tl.constexpr,  # H; 0: only pages are written
    L: tl.constexpr,
    F: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A token's latent and key, or some of its query heads."""
    wait(EARLY)
    programs: tl.constexpr = 1 + (HEADS + B - 1) // B
    token = (tl.program_id(0) // programs).to(tl.int64)
    block = tl.program_id(0) % programs
    angles = None if cos_sin is None else cos_sin + token * cos_sin_stride
    if block == 0:
        slot = tl.load(slots + token).to(tl.int64)
        row, page = rows + token * rows_stride, pages + slot * D
        column = tl.arange(0, F)[None, :]  # [1, F]
        latent = tl.load(row + column, mask=column < L, other=0.0)
        inverse = tl.rsqrt(squares(latent) / L + eps)  # [1]
        latent = weighted(latent, inverse, tl.load(norm + column, mask=column < L, other=0.0))
        tl.store(page + column, latent, mask=(column < L) & (slot >= 0))
        only = tl.zeros([1, 1], tl.int64)
        turn(page + L + only, row + L + only, only == tl.where(slot >= 0, 0, 1), angles, R, E, INTERLEAVED)
    else:
        head = ((block - 1) * B + tl.arange(0, B))[:, None].to(tl.int64)  # [B, 1]
        source = queries + token * queries_stride + head * Q + (Q - R)
        to = query + (token * HEADS + head) * D + L
        turn(to, source, head < HEADS, angles, R, E, INTERLEAVED)


@cache
def _variant(heads: int, latent: int, rotated: int, query: int, key: int, *, interleaved: bool) -> Variant:
    pairs = triton.next_power_of_2(rotated // 2)
    constexprs = {
        "HEADS": heads,
        "L": latent,
        "F": triton.next_power_of_2(latent),
        "R": rotated,
        "E": pairs,
        "Q": query,
        "D": key,
        "B": min(HALF_ELEMENTS // pairs, triton.next_power_of_2(max(1, heads))),
        "INTERLEAVED": interleaved,
    }
    return Variant(latent_rope_kv_write_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def latent_rope_kv_write(
    rows: torch.Tensor,
    queries: torch.Tensor | None,
    norm: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    pages: torch.Tensor,
    eps: float,
    *,
    interleaved: bool,
) -> torch.Tensor | None:
    """Launch; see `kernels.latent_rope_kv_write.latent_rope_kv_write`. Arguments are checked; D is L + R."""
    tokens, heads = len(rows), 0 if queries is None else queries.shape[1]
    query = None if queries is None else queries.new_empty(tokens, heads, pages.shape[3])
    if not tokens:
        return query
    rotated = rows.shape[1] - len(norm)
    inner = 0 if queries is None else queries.shape[2]
    variant = _variant(heads, len(norm), rotated, inner, pages.shape[3], interleaved=interleaved)
    programs = 1 + triton.cdiv(heads, variant.constexprs["B"])
    variant.launch(
        (tokens * programs,),
        pages,
        pages if query is None else query,
        rows,
        rows if queries is None else queries,
        norm,
        cos_sin,
        slots,
        rows.stride(0),
        0 if queries is None else queries.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        eps,
    )
    return query
