"""Finds candidates for the last token that top_k and top_p keep of a row: few, in most rows.

A row has many programs, each with a span of its tokens, in three launches that read the row:

1. The largest logits of each span.
2. A logit that the last one kept is not below. With top_k it is a lower bound of the k-th largest, by what
   the first launch found. With top_p and without top_k each span sums its weights, from some logits up.
3. The candidates: all tokens with at least that logit.

`kernels.cuda.sampling_threshold` launches them. Logits are compared as integers in the same order ("codes").

Dimension letters: R rows; V vocabulary; P spans of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The number of tokens that are read at once. Each lane keeps its largest logit. The k-th largest of these is
# a close lower bound of the k-th largest of all, for k up to BLOCK.
BLOCK = 2048
# The tokens of a span: a multiple of BLOCK.
SPAN = 4 * BLOCK

# The smallest finite float32: what is not forbidden reaches it.
LOWEST = tl.constexpr(-3.4028234663852886e38)


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
def settings_of(top_ks, top_ps, index, vocab):
    """The top_k and top_p of a row, and whether each leaves tokens out."""
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
