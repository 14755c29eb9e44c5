"""Finds which tokens of a row of logits top_k, top_p and min_p keep, without sorting the row.

Tokens are ordered by logit, the largest first, and by id among equals. Each of the three settings keeps a
prefix of this order. So the result is the last token that is kept: a logit and an id.

Each row has one program. It reads the row once for the largest logit and a lower bound of the k-th largest.
It reads the row again to gather the candidates: all tokens with at least some logit, which include the last
one that is kept. There are few candidates in most rows, and bisection over them finds that logit. A row with
top_p and without top_k is read once more before, for the sum of its weights. Logits are compared and bisected
as integers in the same order ("codes").

Exact for top_k. Weights and their sums are float64: top_p keeps what exact arithmetic keeps unless the weight
before some token, as a share of all, is within V * 2**-53 of p (2e-11 for 152k tokens), and min_p unless a
weight relative to the best is within a few times 2**-53 of min_p. So does the CPU; the two can differ only
there, and between tokens whose log-weights are equal in float64 though their logits are not.

Dimension letters: R rows; V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.compile_spec import CompileSpec, Variant

# The number of tokens that are read at once. Each lane keeps its largest logit. The k-th largest of these is
# a close lower bound of the k-th largest of all, for k up to BLOCK.
BLOCK = 2048

_LOWEST = tl.constexpr(
    -3.4028234663852886e38
)  # the smallest finite float32: what is not forbidden reaches it
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
def top_p_bound(row, vocab, best, temperature, top_p, BLOCK: tl.constexpr):
    """A logit such that tokens from it up reach top_p, and top_p of the weight of all tokens."""
    near = tl.zeros([BLOCK], tl.float64)  # weight of tokens within 3 log-weights of the best
    middle = tl.zeros([BLOCK], tl.float64)  # ... within 6
    far = tl.zeros([BLOCK], tl.float64)  # ... within 12
    total = tl.zeros([BLOCK], tl.float64)
    # However these round: what counts is that candidates are bounded by the very value that was summed from.
    reach = best.to(tl.float64)
    near_from = tl.maximum(reach - 3 * temperature, _LOWEST).to(tl.float32)
    middle_from = tl.maximum(reach - 6 * temperature, _LOWEST).to(tl.float32)
    far_from = tl.maximum(reach - 12 * temperature, _LOWEST).to(tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        values = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        weights = weights_of(values, best, temperature)
        near += tl.where(values >= near_from, weights, 0.0)
        middle += tl.where(values >= middle_from, weights, 0.0)
        far += tl.where(values >= far_from, weights, 0.0)
        total += weights
    limit = top_p * tl.sum(total, 0)
    bound = tl.where(tl.sum(far, 0) >= limit, far_from, _LOWEST)
    bound = tl.where(tl.sum(middle, 0) >= limit, middle_from, bound)
    bound = tl.where(tl.sum(near, 0) >= limit, near_from, bound)
    return bound, limit


@triton.jit
def gather(row, vocab, bound, candidates, BLOCK: tl.constexpr):
    """Write the codes of all tokens from a logit up, in the order of ids; returns how many."""
    num = 0
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        values = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        wanted = values >= bound
        at = num + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(candidates + at, ordered(values).to(tl.int32), mask=wanted)
        num += tl.sum(wanted.to(tl.int32), 0)
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
    # Of those with the last logit, as many as it takes to reach the limit.
    missing = limit - weight_from(candidates, num, last + 1, best, temperature, BLOCK)
    needed = tl.ceil(missing / weights_of(unordered(last), best, temperature))
    equals = tl.where(needed < equals, needed.to(tl.int32), equals)
    return last, above + tl.maximum(equals, 1)


@triton.jit
def nth_id(row, vocab, value, n, BLOCK: tl.constexpr):
    """The n-th lowest id, from 1, of the tokens with this logit."""
    found = _ANY_ID
    before = 0
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        equal = tl.load(row + ids, mask=ids < vocab, other=float("-inf")) == value
        rank = before + tl.cumsum(equal.to(tl.int32), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (rank == n), ids, _ANY_ID), 0))
        before += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def likely_from(best, temperature, min_p):
    """The smallest float32 whose weight is at least min_p."""
    low = ordered(tl.full([], _LOWEST, tl.float32))
    high = ordered(best)
    while low < high:
        middle = low + (high - low) // 2
        enough = weights_of(unordered(middle), best, temperature) >= min_p
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return unordered(high)


@triton.jit
def cut_kernel(
    logits,  # [R, V]
    logits_stride,
    vocab,
    temperatures,  # [R]
    top_ks,  # [R]
    top_ps,  # [R]
    min_ps,  # [R]
    out_values,  # [R]
    out_ids,  # [R]
    candidates,  # [R, V] scratch
    BLOCK: tl.constexpr,
):
    """The cut of one row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_stride
    candidates += index * vocab
    temperature = tl.load(temperatures + index).to(tl.float64)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index).to(tl.float64)
    min_p = tl.load(min_ps + index).to(tl.float64)
    has_k = (top_k > 0) & (top_k < vocab)
    has_p = top_p < 1

    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        lanes = tl.maximum(lanes, tl.load(row + ids, mask=ids < vocab, other=float("-inf")))
    best = tl.max(lanes, 0)

    cut = tl.full([], float("-inf"), tl.float32)
    cut_id = tl.full([], _ANY_ID, tl.int32)
    if (has_k | has_p) & (best > float("-inf")):
        bound = tl.full([], _LOWEST, tl.float32)
        limit = tl.full([], 0.0, tl.float64)
        if has_k:
            bound = unordered(kth_of_lanes(ordered(lanes), top_k, ordered(bound), ordered(best)))
        else:
            bound, limit = top_p_bound(row, vocab, best, temperature, top_p, BLOCK)
        kept = gather(row, vocab, bound, candidates, BLOCK)
        num = kept
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
            above = count_from(candidates, num, last + 1, BLOCK)
            cut_id = nth_id(row, vocab, cut, kept - above, BLOCK)

    if (min_p > 0) & (best > float("-inf")):
        floor = likely_from(best, temperature, min_p)
        cut_id = tl.where(floor > cut, _ANY_ID, cut_id)
        cut = tl.maximum(cut, floor)
    tl.store(out_values + index, cut)
    tl.store(out_ids + index, cut_id)


_CUT = Variant(cut_kernel, {"BLOCK": BLOCK}, num_warps=16, num_stages=1)


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

    Checks nothing, reads no device tensor, and launches what follows from the shapes alone. Needs 4 * R * V
    bytes of scratch memory. Mutates `out_values` and `out_ids`, which `kernels.cuda.sampling.choose` takes.

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
    candidates = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    _CUT.launch(
        (rows,),
        logits,
        logits.stride(0),
        vocab,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        out_values,
        out_ids,
        candidates,
    )


def compile_specs() -> list[CompileSpec]:
    """The configuration that is shipped, for the check without a GPU."""
    pointers = {
        "logits": "*fp32",
        "temperatures": "*fp64",
        "top_ks": "*i32",
        "top_ps": "*fp64",
        "min_ps": "*fp64",
        "out_values": "*fp32",
        "out_ids": "*i32",
        "candidates": "*i32",
    }
    types = pointers | {"logits_stride": "i32", "vocab": "i32"}
    return [CompileSpec(_CUT, "sampling_cut", types, divisible_by_16=tuple(types))]
