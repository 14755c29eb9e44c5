"""Applies all settings that leave tokens out of a draw, `workers.outputs.FILTERS`, to rows of logits.

What top_k, top_p and min_p keep ends at a threshold: see `kernels.cuda.sampling_threshold`. What
typical_p keeps is no prefix of this order. A launch after these, a program for each row, rules out the other
tokens in the logits themselves. It bisects the distances of log-weights from their mean, with one reading of
the row for each step.

Dimension letters: R rows; V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_candidates import BLOCK, LOWEST, temperature_of
from kernels.cuda.sampling_threshold import find_thresholds
from kernels.cuda.variant import Variant


@triton.jit
def distances_of(row, ids, vocab, threshold, threshold_id, best, temperature, mean):
    """For some tokens: whether they are kept so far, their weights, and how far these are from the mean."""
    values = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    kept = ((values > threshold) | ((values == threshold) & (ids <= threshold_id))) & (values >= LOWEST)
    log_weights = (tl.where(kept, values, best).to(tl.float64) - best.to(tl.float64)) / temperature
    return kept, tl.where(kept, tl.exp(log_weights), 0.0), tl.abs(log_weights - mean)


@triton.jit
def largest_of(row, vocab, BLOCK: tl.constexpr):
    """The largest logit of a row, at least the smallest finite one."""
    lanes = tl.full([BLOCK], LOWEST, tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        lanes = tl.maximum(lanes, tl.load(row + ids, mask=ids < vocab, other=float("-inf")))
    return tl.max(lanes, 0)


@triton.jit
def mean_log_weight(row, vocab, threshold, threshold_id, best, temperature, BLOCK: tl.constexpr):
    """The mean log-weight of the tokens that are kept so far, and the sum of their weights."""
    total = tl.zeros([BLOCK], tl.float64)
    product = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        # Log-weights are not positive.
        _kept, weights, below = distances_of(row, ids, vocab, threshold, threshold_id, best, temperature, 0.0)
        total += weights
        product -= weights * below
    return tl.sum(product, 0) / tl.sum(total, 0), tl.sum(total, 0)


@triton.jit
def around(row, vocab, threshold, threshold_id, best, temperature, mean, distance, BLOCK: tl.constexpr):
    """The weight of the tokens up to this distance, the largest distance of these, and the next one."""
    weight = tl.zeros([BLOCK], tl.float64)
    below = tl.full([BLOCK], 0.0, tl.float64)
    above = tl.full([BLOCK], float("inf"), tl.float64)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)  # [BLOCK]
        kept, weights, distances = distances_of(
            row, ids, vocab, threshold, threshold_id, best, temperature, mean
        )
        near = kept & (distances <= distance)
        weight += tl.where(near, weights, 0.0)
        below = tl.maximum(below, tl.where(near, distances, 0.0))
        above = tl.minimum(above, tl.where(kept & (distances > distance), distances, float("inf")))
    return tl.sum(weight, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def typical_kernel(
    logits,  # [R, V], mutated
    temperatures,  # [R]
    typical_ps,  # [R]
    threshold_values,  # [R]
    threshold_ids,  # [R]
    logits_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """Rule out the tokens of one row that typical_p leaves out."""
    index = tl.program_id(0).to(tl.int64)
    typical_p = tl.load(typical_ps + index).to(tl.float64)
    if typical_p < 1:
        row = logits + index * logits_stride
        best = largest_of(row, vocab, BLOCK)
        temperature = temperature_of(temperatures, index)
        threshold = tl.load(threshold_values + index)
        threshold_id = tl.load(threshold_ids + index)
        mean, total = mean_log_weight(row, vocab, threshold, threshold_id, best, temperature, BLOCK)
        # The last distance that is kept is from `low` to `high`, which are distances of tokens.
        weight, below, low = around(row, vocab, threshold, threshold_id, best, temperature, mean, -1.0, BLOCK)
        weight, high, above = around(
            row, vocab, threshold, threshold_id, best, temperature, mean, float("inf"), BLOCK
        )
        while low < high:
            middle = low + (high - low) / 2
            middle = tl.where(middle < high, middle, low)
            weight, below, above = around(
                row, vocab, threshold, threshold_id, best, temperature, mean, middle, BLOCK
            )
            enough = weight >= typical_p * total
            high = tl.where(enough, below, high)
            low = tl.where(enough, low, above)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)  # [BLOCK]
            kept, _weights, distances = distances_of(
                row, ids, vocab, threshold, threshold_id, best, temperature, mean
            )
            tl.store(row + ids, float("-inf"), mask=kept & (distances > high))


_TYPICAL = Variant(typical_kernel, {"BLOCK": BLOCK}, num_warps=16, num_stages=1)


def apply_filters(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of each row: the values and ids of `find_thresholds`, of tokens above -infinity.

    Mutates `logits`: tokens that typical_p leaves out become -infinity.

    Args:
        logits: [R or more, V] as for `find_thresholds`.
        temperatures, top_k, top_p, min_p, typical_p: [R].
    """
    threshold_ids = torch.empty_like(top_k)
    threshold_values = torch.empty_like(threshold_ids, dtype=torch.float32)
    rows = logits[: len(threshold_ids)]
    find_thresholds(rows, temperatures, top_k, top_p, min_p, threshold_values, threshold_ids)
    if len(rows):
        settings = temperatures, typical_p, threshold_values, threshold_ids
        _TYPICAL.launch((len(rows),), rows, *settings, rows.stride(0), rows.shape[1])
    return threshold_values, threshold_ids
