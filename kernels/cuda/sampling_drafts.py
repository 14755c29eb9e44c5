"""Keeps a draft or draws another token, for rows of logits: rejection sampling of drafts.

`workers/distribution.py` has the method and its sources. Each row has one program, which reads the row once
for its best logit, once for the sum of its weights, once for each draft that is not kept, and once for the
draw. Weights are exp((logit - best) / temperature) in float64, as on the CPU, and added in another order: so
tokens are the same unless a draft is kept or not, or two scores differ, by about 1e-13.

What is left of the distribution p after drafts that were not kept, all drawn from q, is
max(0, p_factor * p - q_factor * q): otherwise the residual of a residual would need a table of its own.

Dimension letters: R rows; V vocabulary; D drafts of all rows together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling import gumbel
from kernels.cuda.sampling_weight import without_cut
from kernels.cuda.variant import Variant

BLOCK = 1024


@triton.jit
def best_of(logits, vocab, BLOCK: tl.constexpr):
    """The largest logit in float64, and the lowest id of it."""
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_ids = tl.arange(0, BLOCK)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        values = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        lane_ids = tl.where(values > lane_best, ids, lane_ids)
        lane_best = tl.maximum(lane_best, values)
    best = tl.max(lane_best, 0)
    return best.to(tl.float64), tl.min(tl.where(lane_best == best, lane_ids, vocab), 0)


@triton.jit
def weights_of(logits, ids, within, row, cut_values, cut_ids, best, best_id, temperature):
    """The weights of some tokens in float64: relative to the best's, 0 for those that are cut off."""
    values = tl.load(logits + ids, mask=within, other=float("-inf"))
    values = without_cut(values, ids, row, cut_values, cut_ids)
    drawn = tl.exp((values.to(tl.float64) - best) / tl.where(temperature > 0, temperature, 1.0))
    return tl.where(temperature > 0, drawn, (ids == best_id).to(tl.float64))


@triton.jit
def residual_of(
    logits, vocab, drawn_from, p_factor, q_factor,
    row, cut_values, cut_ids, best, best_id, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What is left after another draft, in all; and the most likely token so far, the lowest of equals."""
    left = tl.zeros([BLOCK], tl.float64)
    most = tl.full([BLOCK], -1.0, tl.float64)
    most_ids = tl.arange(0, BLOCK)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        within = ids < vocab
        weights = weights_of(logits, ids, within, row, cut_values, cut_ids, best, best_id, temperature)
        q = tl.load(drawn_from + ids, mask=within, other=0.0)
        left += tl.maximum(p_factor * weights - (q_factor + 1.0) * q, 0.0)
        now = p_factor * weights - q_factor * q
        most_ids = tl.where(now > most, ids, most_ids)
        most = tl.maximum(most, now)
    return tl.sum(left, 0), tl.min(tl.where(most == tl.max(most, 0), most_ids, vocab), 0)


@triton.jit
def draw_from_left(
    logits, vocab, drawn_from, key, p_factor, q_factor,
    row, cut_values, cut_ids, best, best_id, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A draw from what is left."""
    lane_scores = tl.full([BLOCK], float("-inf"), tl.float64)
    lane_ids = tl.arange(0, BLOCK)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        within = ids < vocab
        weights = weights_of(logits, ids, within, row, cut_values, cut_ids, best, best_id, temperature)
        left = p_factor * weights - q_factor * tl.load(drawn_from + ids, mask=within, other=0.0)
        scores = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)) + gumbel(key, ids), float("-inf"))
        lane_ids = tl.where(scores > lane_scores, ids, lane_ids)
        lane_scores = tl.maximum(lane_scores, scores)
    return tl.min(tl.where(lane_scores == tl.max(lane_scores, 0), lane_ids, vocab), 0)


@triton.jit
def draft_kernel(
    logits,  # [R, V]
    logits_stride,
    vocab,
    temperatures,  # [R]
    cut_values,  # [R], or None
    cut_ids,  # [R], or None
    drawn_from,  # [R, V]
    drafts,  # [D]
    begins,  # [R + 1]
    keep_keys,  # [R]
    draw_keys,  # [R]
    out,  # [R]
    BLOCK: tl.constexpr,
):
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    drawn_from += row * vocab
    temperature = tl.load(temperatures + row).to(tl.float64)
    best, best_id = best_of(logits, vocab, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        total += weights_of(logits, ids, ids < vocab, row, cut_values, cut_ids, best, best_id, temperature)
    p_factor = 1.0 / tl.sum(total, 0)
    q_factor = tl.full([], 0.0, tl.float64)

    begin = tl.load(begins + row)
    keep_key = tl.load(keep_keys + row)
    chosen = tl.full([], -1, tl.int64)
    for at in range(begin, tl.load(begins + row + 1)):
        if chosen < 0:
            draft = tl.load(drafts + at)
            weight = weights_of(
                logits, draft, draft < vocab, row, cut_values, cut_ids, best, best_id, temperature
            )
            q = tl.load(drawn_from + draft)
            left = p_factor * weight - q_factor * q
            if tl.rand(keep_key, at - begin).to(tl.float64) * q < left:
                chosen = draft
            else:
                residual, most_likely = residual_of(
                    logits, vocab, drawn_from, p_factor, q_factor,
                    row, cut_values, cut_ids, best, best_id, temperature,
                    BLOCK,
                )  # fmt: skip
                if residual > 0:
                    p_factor = p_factor / residual
                    q_factor = (q_factor + 1.0) / residual
                else:
                    # Both distributions are equal up to rounding, so any likely token will do.
                    chosen = most_likely.to(tl.int64)
    if chosen < 0:
        chosen = draw_from_left(
            logits, vocab, drawn_from, tl.load(draw_keys + row), p_factor, q_factor,
            row, cut_values, cut_ids, best, best_id, temperature,
            BLOCK,
        ).to(tl.int64)  # fmt: skip
    tl.store(out + row, chosen)


_DRAFTS = Variant(draft_kernel, {"BLOCK": BLOCK}, num_warps=8, num_stages=1)


def keep_or_draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    cut_values: torch.Tensor | None,
    cut_ids: torch.Tensor | None,
    drawn_from: torch.Tensor,
    drafts: torch.Tensor,
    begins: torch.Tensor,
    keep_keys: torch.Tensor,
    draw_keys: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Keep one of each row's drafts, or draw another token.

    Checks nothing and reads no device tensor. Mutates `out`.

    Args:
        logits: [R, V] float32, in each row one that is finite and kept, none +infinity or NaN; rows at any
            stride, tokens contiguous.
        temperatures: [R] float64. 0 or less: the most likely token, the lowest of equals, has probability 1.
        cut_values, cut_ids: As for `kernels.cuda.sampling.choose`.
        drawn_from: [R, V] float64 contiguous, the probabilities in the distribution of each row's drafts.
        drafts: [D] int64, below V.
        begins: [R + 1] int64, the first draft of each row, and D.
        keep_keys, draw_keys: [R] int64, the bits of the uint64 from `workers.counter_rng.mix_key`.
        out: [R] int64.
    """
    if not len(logits):
        return
    _DRAFTS.launch(
        (len(logits),),
        logits,
        logits.stride(0),
        logits.shape[1],
        temperatures,
        cut_values,
        cut_ids,
        drawn_from,
        drafts,
        begins,
        keep_keys,
        draw_keys,
        out,
    )
