"""Finds which tokens of a row of logits top_k, top_p and min_p keep, without sorting the row.

Tokens are ordered by logit, the largest first, and by id among equals. Each of these filters keeps a prefix
of this order. So the result is a threshold, the last token that is kept: a logit and an id.

After the three launches of `kernels.cuda.sampling_candidates`, a program of each row finds the threshold by
bisection over the candidates. Rows without filters are left alone by all but this launch, which notes so.

Exact for top_k. Weights and their sums are float64: top_p keeps what exact arithmetic keeps unless the weight
before some token, as a share of all, is within V * 2**-53 of p (2e-11 for 152k tokens), and min_p unless a
weight relative to the best is within a few times 2**-53 of min_p. So does the CPU; the two can differ only
there, and between tokens whose log-weights are equal in float64 though their logits are not.

Dimension letters: R rows; V vocabulary; P spans of a row.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_candidates import (
    BLOCK,
    LOWEST,
    SPAN,
    best_of,
    bound_kernel,
    gather_kernel,
    maxima_kernel,
    ordered,
    settings_of,
    temperature_of,
    unordered,
    weights_of,
)
from kernels.cuda.variant import Variant

_ANY_ID = tl.constexpr(2147483647)


@triton.jit
def count_from(candidates, num, least, BLOCK: tl.constexpr):
    """How many candidates have at least this code."""
    total = 0
    for first in range(0, num, BLOCK):
        at = first + tl.arange(0, BLOCK)  # [BLOCK]
        codes = tl.load(candidates + at, mask=at < num, other=0)
        total += tl.sum(((codes >= least) & (at < num)).to(tl.int32), 0)
    return total


@triton.jit
def weight_from(candidates, num, least, best, temperature, BLOCK: tl.constexpr):
    """The weights of the candidates with at least this code, summed."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, num, BLOCK):
        at = first + tl.arange(0, BLOCK)  # [BLOCK]
        codes = tl.load(candidates + at, mask=at < num, other=0)
        weights = weights_of(unordered(codes), best, temperature)
        total += tl.where((codes >= least) & (at < num), weights, 0.0)
    return tl.sum(total, 0)


@triton.jit
def close_up(candidates, counts, spans, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Move the candidates of all spans of a row to the front of the first; returns how many."""
    num = tl.load(counts)
    for span in range(1, spans):
        more = tl.load(counts + span)
        for first in range(0, more, BLOCK):
            at = first + tl.arange(0, BLOCK)
            codes = tl.load(candidates + span * SPAN + at, mask=at < more, other=0)
            tl.debug_barrier()  # the places may be those of codes that another thread reads
            tl.store(candidates + num + at, codes, mask=at < more)
        num += more
    tl.debug_barrier()  # every thread of the program reads what others stored
    return num


@triton.jit
def threshold_by_count(candidates, num, k, lowest, highest, BLOCK: tl.constexpr):
    """top_k: the code of the last token kept, and how many are kept."""
    last = lowest
    high = highest
    while last < high:
        middle = last + (high - last + 1) // 2
        enough = count_from(candidates, num, middle, BLOCK) >= k
        last = tl.where(enough, middle, last)
        high = tl.where(enough, high, middle - 1)
    return last, tl.minimum(k, count_from(candidates, num, last, BLOCK))


@triton.jit
def threshold_by_weight(candidates, num, limit, lowest, kept, best, temperature, BLOCK: tl.constexpr):
    """top_p: likewise, among the `kept` tokens from the code `lowest` up, which reach the limit."""
    last = lowest
    high = ordered(best)
    while last < high:
        middle = last + (high - last + 1) // 2
        enough = weight_from(candidates, num, middle, best, temperature, BLOCK) >= limit
        last = tl.where(enough, middle, last)
        high = tl.where(enough, high, middle - 1)
    above = count_from(candidates, num, last + 1, BLOCK)
    equals = tl.where(last == lowest, kept, count_from(candidates, num, last, BLOCK)) - above
    # Of the tokens with the last logit, as many as needed to reach the limit.
    missing = limit - weight_from(candidates, num, last + 1, best, temperature, BLOCK)
    needed = tl.ceil(missing / weights_of(unordered(last), best, temperature))
    equals = tl.where(needed < equals, needed.to(tl.int32), equals)
    return last, above + tl.maximum(equals, 1)


@triton.jit
def nth_id(
    row, vocab, candidates, counts, num, bound, code, n, spans, BLOCK: tl.constexpr, SPAN: tl.constexpr
):
    """The id of the n-th candidate, from 1, with this code: that with the n-th lowest id."""
    place = num  # among all candidates
    before = 0
    for first in range(0, num, BLOCK):
        at = first + tl.arange(0, BLOCK)  # [BLOCK]
        equal = (tl.load(candidates + at, mask=at < num, other=0) == code) & (at < num)
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        place = tl.minimum(place, tl.min(tl.where(equal & (rank == n), at, num), 0))
        before += tl.sum(equal.to(tl.int32), 0)
    span = 0
    begin = 0  # the place of its first candidate
    end = 0
    for other in range(spans):
        end += tl.load(counts + other)
        span = tl.where(end <= place, other + 1, span)
        begin = tl.where(end <= place, end, begin)
    found = _ANY_ID
    at_first = begin
    for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        wanted = tl.load(row + ids, mask=ids < vocab, other=float("-inf")) >= bound
        places = at_first + tl.cumsum(wanted.to(tl.int32), 0) - 1
        found = tl.minimum(found, tl.min(tl.where(wanted & (places == place), ids, _ANY_ID), 0))
        at_first += tl.sum(wanted.to(tl.int32), 0)
    return found


@triton.jit
def likely_from(best, temperature, min_p):
    """The smallest float32 whose weight is at least min_p."""
    low = ordered(tl.full([], LOWEST, tl.float32))
    high = ordered(best)
    while low < high:
        middle = low + (high - low) // 2
        enough = weights_of(unordered(middle), best, temperature) >= min_p
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return unordered(high)


@triton.jit(do_not_specialize=["spans"])
def threshold_kernel(
    out_values,  # [R], written
    out_ids,  # [R], written
    candidates,  # [R, P, SPAN], moved within each row
    counts,  # [R, P]
    bounds,  # [R]
    limits,  # [R]
    maxima,  # [R, P]
    logits,  # [R, V]
    temperatures,  # [R]
    top_ks,  # [R]
    top_ps,  # [R]
    min_ps,  # [R]
    logits_stride,
    vocab,
    spans,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The threshold of one row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    candidates += index * spans * SPAN
    counts += index * spans
    temperature = temperature_of(temperatures, index)
    top_k, top_p, has_k, has_p = settings_of(top_ks, top_ps, index, vocab)
    min_p = tl.load(min_ps + index).to(tl.float64)
    best = best_of(maxima, index, spans, PADDED)

    threshold = tl.full([], float("-inf"), tl.float32)
    threshold_id = tl.full([], _ANY_ID, tl.int32)
    if (has_k | has_p) & (best > float("-inf")):
        bound = tl.load(bounds + index)
        limit = tl.load(limits + index)  # not used with top_k
        num = close_up(candidates, counts, spans, BLOCK, SPAN)
        kept = num
        last = ordered(bound)
        if has_k:
            last, kept = threshold_by_count(candidates, num, top_k, last, ordered(best), BLOCK)
            above = count_from(candidates, num, last + 1, BLOCK)
            equals = (kept - above) * weights_of(unordered(last), best, temperature)
            limit = top_p * (weight_from(candidates, num, last + 1, best, temperature, BLOCK) + equals)
        if has_p:
            last, kept = threshold_by_weight(candidates, num, limit, last, kept, best, temperature, BLOCK)
        threshold = unordered(last)
        if kept < count_from(candidates, num, last, BLOCK):
            n = kept - count_from(candidates, num, last + 1, BLOCK)
            threshold_id = nth_id(row, vocab, candidates, counts, num, bound, last, n, spans, BLOCK, SPAN)

    if (min_p > 0) & (best > float("-inf")):
        floor = likely_from(best, temperature, min_p)
        threshold_id = tl.where(floor > threshold, _ANY_ID, threshold_id)
        threshold = tl.maximum(threshold, floor)
    tl.store(out_values + index, threshold)
    tl.store(out_ids + index, threshold_id)


@cache
def _variants(spans: int, span: int) -> tuple[Variant, Variant, Variant, Variant]:
    """The variants of the four launches, in order. `span`: SPAN."""
    sizes = {"BLOCK": BLOCK, "SPAN": span}
    padded = sizes | {"PADDED": triton.next_power_of_2(spans)}
    return (
        Variant(maxima_kernel, sizes, num_warps=8, num_stages=1),
        Variant(bound_kernel, padded, num_warps=8, num_stages=1),
        Variant(gather_kernel, padded, num_warps=8, num_stages=1),
        Variant(threshold_kernel, padded, num_warps=16, num_stages=1),
    )


def find_thresholds(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    out_values: torch.Tensor,
    out_ids: torch.Tensor,
) -> None:
    """Find the last token that each row's top_k, top_p and min_p keep, applied in this order.

    Checks nothing, reads no device tensor, and launches what follows from the shapes alone. Needs 4 bytes of
    scratch memory for each row and token, with the tokens that fill up the last span. Mutates `out_values`
    and `out_ids`, which `kernels.cuda.sampling.choose` takes.

    Args:
        logits: [R, V] float32; rows at any stride, tokens contiguous. For a row with NaN or +infinity the
            result is meaningless.
        temperatures: [R] float32 or float64; rows at 0 or less are filtered as at 1.
        top_ks: [R] int32. 0: keeps all.
        top_ps: [R] float32 or float64. 1: keeps all.
        min_ps: [R] float32 or float64. 0: keeps all.
        out_values: [R] float32, the logit of the last token kept; -inf where all are kept.
        out_ids: [R] int32, its id, or the largest int32 where all tokens with this logit are kept.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    spans = triton.cdiv(vocab, SPAN)
    candidates = torch.empty(rows, spans, SPAN, dtype=torch.int32, device=logits.device)
    counts = torch.empty(rows, spans, dtype=torch.int32, device=logits.device)
    maxima = torch.empty(rows, spans, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, spans, 4, dtype=torch.float64, device=logits.device)
    bounds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    limits = torch.empty(rows, dtype=torch.float64, device=logits.device)
    sizes, settings = (logits.stride(0), vocab, spans), (temperatures, top_ks, top_ps)
    find_maxima, find_bounds, gather, find_last = _variants(spans, SPAN)
    grid = rows, spans
    find_maxima.launch(grid, candidates, maxima, logits, *sizes)
    find_bounds.launch(grid, candidates, bounds, sums, maxima, logits, *settings, *sizes)
    gather.launch(grid, candidates, counts, bounds, limits, sums, maxima, logits, *settings, *sizes)
    found = candidates, counts, bounds, limits, maxima
    find_last.launch((rows,), out_values, out_ids, *found, logits, *settings, min_ps, *sizes)
