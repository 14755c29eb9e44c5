"""Finds which tokens of a row of logits top_k, top_p and min_p keep, without sorting the row.

Tokens are ordered by logit, the largest first, and by id among equals. Each of these settings keeps a prefix
of this order. So the result is the last token that is kept: a logit and an id.

A row has many programs, each with a span of its tokens, in three launches that read the row:

1. The largest logits of each span.
2. A logit that the last one kept is not below. With top_k it is a lower bound of the k-th largest, by what
   the first launch found. With top_p and without top_k each span sums its weights, from some logits up.
3. The candidates: all tokens with at least that logit.

There are few candidates in most rows. In a fourth launch a program of each row finds the last token kept, by
bisection over them. Logits are compared and bisected as integers in the same order ("codes"). Rows without
limits are left alone by all but the last, which notes so.

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

from kernels.cuda.variant import Variant

# The number of tokens that are read at once. Each lane keeps its largest logit. The k-th largest of these is
# a close lower bound of the k-th largest of all, for k up to BLOCK.
BLOCK = 2048
# The tokens of a span: a multiple of BLOCK.
SPAN = 4 * BLOCK

# The smallest finite float32: what is not forbidden reaches it.
LOWEST = tl.constexpr(-3.4028234663852886e38)
_ANY_ID = tl.constexpr(2147483647)


@triton.jit
def ordered(values):
    """float32 as int64 in the same order; -0.0 as 0.0, to which it is equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unordered(codes):
    """The float32 whose code this is."""
    bits = codes.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(values, best, temperature):
    """exp((logit - best) / temperature) in float64: 1 for the most likely token."""
    return tl.exp((values.to(tl.float64) - best.to(tl.float64)) / temperature)


@triton.jit
def kth_of_lanes(lanes, k, low, high):
    """The largest code that at least k lanes reach; low if there is none above it."""
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


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
def settings_of(top_ks, top_ps, index, vocab):
    """The top_k and top_p of a row, and whether each is a limit."""
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index).to(tl.float64)
    return top_k, top_p, (top_k > 0) & (top_k < vocab), top_p < 1


@triton.jit
def temperature_of(temperatures, index):
    """The temperature of a row in float64; 1 where the most likely token is chosen."""
    temperature = tl.load(temperatures + index).to(tl.float64)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def best_of(maxima, index, spans, PADDED: tl.constexpr):
    """The largest logit of a row."""
    span = tl.arange(0, PADDED)
    return tl.max(tl.load(maxima + index * spans + span, mask=span < spans, other=float("-inf")), 0)


@triton.jit
def reach(best, temperature, distance: tl.constexpr):
    """The logit that lies so many log-weights below the best.

    However it rounds: what counts is that candidates are bounded by the very value that was summed from.
    """
    return tl.maximum(best.to(tl.float64) - distance * temperature, LOWEST).to(tl.float32)


@triton.jit(do_not_specialize=["spans"])
def maxima_kernel(
    candidates,  # [R, P, SPAN]: the first BLOCK of each span are written, codes
    maxima,  # [R, P] float32, written: the largest logit of each span
    logits,  # [R, V]
    logits_stride,
    vocab,
    spans,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The largest logit of each lane, and of all lanes, in one span."""
    index, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * logits_stride
    at = index * spans + span
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        lanes = tl.maximum(lanes, tl.load(row + ids, mask=ids < vocab, other=float("-inf")))
    tl.store(candidates + at * SPAN + tl.arange(0, BLOCK), ordered(lanes).to(tl.int32))
    tl.store(maxima + at, tl.max(lanes, 0))


@triton.jit(do_not_specialize=["spans"])
def bound_kernel(
    candidates,  # [R, P, SPAN], as `maxima_kernel` has left them
    bounds,  # [R] float32, written for rows with top_k: at least k logits reach it
    sums,  # [R, P, 4] float64, written for other rows with top_p: weights within 3, 6, 12 of the best; all
    maxima,
    logits,
    temperatures,
    top_ks,
    top_ps,
    logits_stride,
    vocab,
    spans,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The first program of a row with top_k, and every one of a row with top_p alone."""
    index, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, _, has_k, has_p = settings_of(top_ks, top_ps, index, vocab)
    best = best_of(maxima, index, spans, PADDED)
    if has_k & (span == 0):
        lanes = tl.load(candidates + index * spans * SPAN + tl.arange(0, BLOCK))
        for other in range(1, spans):
            theirs = candidates + (index * spans + other) * SPAN
            lanes = tl.maximum(lanes, tl.load(theirs + tl.arange(0, BLOCK)))
        low = ordered(tl.full([], LOWEST, tl.float32))
        bound = kth_of_lanes(lanes.to(tl.int64), top_k, low, ordered(best))
        tl.store(bounds + index, unordered(bound))
    if has_p & ((top_k <= 0) | (top_k >= vocab)):
        row = logits + index * logits_stride
        temperature = temperature_of(temperatures, index)
        near = tl.zeros([BLOCK], tl.float64)
        middle = tl.zeros([BLOCK], tl.float64)
        far = tl.zeros([BLOCK], tl.float64)
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
            ids = first + tl.arange(0, BLOCK)  # [BLOCK]
            values = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            weights = weights_of(values, best, temperature)
            near += tl.where(values >= reach(best, temperature, 3), weights, 0.0)
            middle += tl.where(values >= reach(best, temperature, 6), weights, 0.0)
            far += tl.where(values >= reach(best, temperature, 12), weights, 0.0)
            total += weights
        to = sums + (index * spans + span) * 4
        tl.store(to, tl.sum(near, 0))
        tl.store(to + 1, tl.sum(middle, 0))
        tl.store(to + 2, tl.sum(far, 0))
        tl.store(to + 3, tl.sum(total, 0))


@triton.jit
def top_p_bound(sums, best, temperature, top_p, spans, PADDED: tl.constexpr):
    """A logit such that tokens from it up reach top_p, and top_p of the weight of all tokens."""
    span = tl.arange(0, PADDED)
    near = tl.sum(tl.load(sums + span * 4, mask=span < spans, other=0.0), 0)
    middle = tl.sum(tl.load(sums + span * 4 + 1, mask=span < spans, other=0.0), 0)
    far = tl.sum(tl.load(sums + span * 4 + 2, mask=span < spans, other=0.0), 0)
    limit = top_p * tl.sum(tl.load(sums + span * 4 + 3, mask=span < spans, other=0.0), 0)
    bound = tl.where(far >= limit, reach(best, temperature, 12), LOWEST)
    bound = tl.where(middle >= limit, reach(best, temperature, 6), bound)
    return tl.where(near >= limit, reach(best, temperature, 3), bound), limit


@triton.jit(do_not_specialize=["spans"])
def gather_kernel(
    candidates,  # [R, P, SPAN], written: the codes of those of each span, in the order of ids
    counts,  # [R, P], written: how many
    bounds,  # [R], written for rows without top_k
    limits,  # [R] float64, written likewise: top_p of the weight of all tokens
    sums,
    maxima,
    logits,
    temperatures,
    top_ks,
    top_ps,
    logits_stride,
    vocab,
    spans,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The candidates of one span."""
    index, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, top_p, has_k, has_p = settings_of(top_ks, top_ps, index, vocab)
    if has_k | has_p:
        row = logits + index * logits_stride
        if has_k:
            bound = tl.load(bounds + index)
        else:
            temperature = temperature_of(temperatures, index)
            best = best_of(maxima, index, spans, PADDED)
            bound, limit = top_p_bound(sums + index * spans * 4, best, temperature, top_p, spans, PADDED)
            if span == 0:
                tl.store(bounds + index, bound)
                tl.store(limits + index, limit)
        at = index * spans + span
        num = 0
        for first in range(span * SPAN, span * SPAN + SPAN, BLOCK):
            ids = first + tl.arange(0, BLOCK)  # [BLOCK]
            values = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            wanted = values >= bound
            to = candidates + at * SPAN + num + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(to, ordered(values).to(tl.int32), mask=wanted)
            num += tl.sum(wanted.to(tl.int32), 0)
        tl.store(counts + at, num)


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
def cut_by_count(candidates, num, k, lowest, highest, BLOCK: tl.constexpr):
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
def cut_by_weight(candidates, num, limit, lowest, kept, best, temperature, BLOCK: tl.constexpr):
    """top_p: as `cut_by_count`, among the `kept` tokens from the code `lowest` up, which reach the limit."""
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
def cut_kernel(
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
    """The cut of one row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    candidates += index * spans * SPAN
    counts += index * spans
    temperature = temperature_of(temperatures, index)
    top_k, top_p, has_k, has_p = settings_of(top_ks, top_ps, index, vocab)
    min_p = tl.load(min_ps + index).to(tl.float64)
    best = best_of(maxima, index, spans, PADDED)

    cut = tl.full([], float("-inf"), tl.float32)
    cut_id = tl.full([], _ANY_ID, tl.int32)
    if (has_k | has_p) & (best > float("-inf")):
        bound = tl.load(bounds + index)
        limit = tl.load(limits + index)  # not used with top_k
        num = close_up(candidates, counts, spans, BLOCK, SPAN)
        kept = num
        last = ordered(bound)
        if has_k:
            last, kept = cut_by_count(candidates, num, top_k, last, ordered(best), BLOCK)
            above = count_from(candidates, num, last + 1, BLOCK)
            equals = (kept - above) * weights_of(unordered(last), best, temperature)
            limit = top_p * (weight_from(candidates, num, last + 1, best, temperature, BLOCK) + equals)
        if has_p:
            last, kept = cut_by_weight(candidates, num, limit, last, kept, best, temperature, BLOCK)
        cut = unordered(last)
        if kept < count_from(candidates, num, last, BLOCK):
            n = kept - count_from(candidates, num, last + 1, BLOCK)
            cut_id = nth_id(row, vocab, candidates, counts, num, bound, last, n, spans, BLOCK, SPAN)

    if (min_p > 0) & (best > float("-inf")):
        floor = likely_from(best, temperature, min_p)
        cut_id = tl.where(floor > cut, _ANY_ID, cut_id)
        cut = tl.maximum(cut, floor)
    tl.store(out_values + index, cut)
    tl.store(out_ids + index, cut_id)


@cache
def _variants(spans: int, span: int) -> tuple[Variant, Variant, Variant, Variant]:
    """The variants of the four launches, in order. `span`: SPAN."""
    sizes = {"BLOCK": BLOCK, "SPAN": span}
    padded = sizes | {"PADDED": triton.next_power_of_2(spans)}
    return (
        Variant(maxima_kernel, sizes, num_warps=8, num_stages=1),
        Variant(bound_kernel, padded, num_warps=8, num_stages=1),
        Variant(gather_kernel, padded, num_warps=8, num_stages=1),
        Variant(cut_kernel, padded, num_warps=16, num_stages=1),
    )


def find_cuts(
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
        temperatures: [R] float32 or float64; the cuts of rows at 0 or less are computed at 1.
        top_ks: [R] int32. 0: no limit.
        top_ps: [R] float32 or float64. 1: no limit.
        min_ps: [R] float32 or float64. 0: no limit.
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
    find_maxima, find_bounds, gather, cut = _variants(spans, SPAN)
    grid = rows, spans
    find_maxima.launch(grid, candidates, maxima, logits, *sizes)
    find_bounds.launch(grid, candidates, bounds, sums, maxima, logits, *settings, *sizes)
    gather.launch(grid, candidates, counts, bounds, limits, sums, maxima, logits, *settings, *sizes)
    found = candidates, counts, bounds, limits, maxima
    cut.launch((rows,), out_values, out_ids, *found, logits, *settings, min_ps, *sizes)
