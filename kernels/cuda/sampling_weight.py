"""The log-probability of a token in the distribution that it was drawn from, for rows of logits.

In the first kernel, a program sums the weights of a block of the vocabulary. In the second, a program adds
those of a row. Weights are exp((logit - best) / temperature) in float64, as on the CPU. Their sums have
another order, so a log-probability differs by about 1e-13 at most.

Dimension letters: R rows; V vocabulary; B blocks of the vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling import BLOCK, filtered
from kernels.cuda.variant import Variant


@triton.jit
def weigh_block_kernel(
    logits,  # [R, V]
    logits_stride,
    vocab,
    temperatures,  # [R]
    threshold_values,  # [R], or None
    threshold_ids,  # [R], or None
    block_best,  # [R, B] the largest logit that is kept
    block_ids,  # [R, B] its token
    block_weights,  # [R, B] the weights of those that are kept, relative to it
    BLOCK: tl.constexpr,
):
    """Sum the weights of one block."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    out = row * tl.num_programs(1) + tl.program_id(1)
    ids = first + tl.arange(0, BLOCK)  # [BLOCK]
    values = tl.load(logits + row * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    values = filtered(values, ids, row, threshold_values, threshold_ids)
    best = tl.max(values, 0)
    temperature = tl.load(temperatures + row).to(tl.float64)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    origin = tl.where(best > float("-inf"), best, 0.0).to(tl.float64)  # never -inf - -inf
    weights = tl.exp((values.to(tl.float64) - origin) / temperature)
    tl.store(block_best + out, best)
    tl.store(block_ids + out, first + tl.argmax(values, 0))  # the lowest of equals
    tl.store(block_weights + out, tl.sum(weights, 0))


@triton.jit
def weigh_row_kernel(
    out,  # [R]
    logits,  # [R, V]
    logits_stride,
    tokens,  # [R]
    temperatures,  # [R]
    threshold_values,  # [R], or None
    threshold_ids,  # [R], or None
    block_best,  # [R, B]
    block_ids,  # [R, B]
    block_weights,  # [R, B]
    num_blocks,
    WIDTH: tl.constexpr,  # the power of two from B up
):
    """The log-probability of the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, WIDTH)  # [WIDTH]
    within = blocks < num_blocks
    at = row * num_blocks + blocks
    bests = tl.load(block_best + at, mask=within, other=float("-inf"))
    weights = tl.load(block_weights + at, mask=within, other=0.0)
    best = tl.max(bests, 0).to(tl.float64)
    token = tl.load(tokens + row)
    value = tl.load(logits + row * logits_stride + token)
    value = filtered(value, token, row, threshold_values, threshold_ids).to(tl.float64)
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        total = tl.sum(weights * tl.exp((bests.to(tl.float64) - best) / temperature), 0)
        probability = tl.exp((value - best) / temperature) / total
    else:
        first = tl.load(block_ids + row * num_blocks + tl.argmax(bests, 0))
        probability = tl.where(token == first, 1.0, 0.0).to(tl.float64)
    tl.store(out + row, tl.log(probability))


_BLOCKS = Variant(weigh_block_kernel, {"BLOCK": BLOCK}, num_warps=4, num_stages=1)


@cache
def _rows(num_blocks: int) -> Variant:
    constexprs = {"WIDTH": triton.next_power_of_2(num_blocks)}
    return Variant(weigh_row_kernel, constexprs, num_warps=4, num_stages=1)


def log_probabilities(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    tokens: torch.Tensor,
    out: torch.Tensor,
    threshold_values: torch.Tensor | None = None,
    threshold_ids: torch.Tensor | None = None,
) -> None:
    """The log-probability of one token of each row.

    Checks nothing, reads no device tensor, and launches what follows from the shapes alone. Mutates `out`.

    Args:
        logits: [R, V] float32, V >= 1, in each row one that is finite and kept, none +infinity or NaN; rows
            at any stride, tokens contiguous.
        temperatures: [R] float64. 0 or less: the most likely token, the lowest of equals, has probability 1.
        tokens: [R] int64.
        out: [R] float64. -infinity for a token that is filtered out, forbidden, or has too small a weight.
        threshold_values, threshold_ids: As for `kernels.cuda.sampling.choose`.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    num_blocks = triton.cdiv(vocab, BLOCK)
    block_best = torch.empty((rows, num_blocks), dtype=torch.float32, device=logits.device)
    block_ids = torch.empty((rows, num_blocks), dtype=torch.int32, device=logits.device)
    block_weights = torch.empty((rows, num_blocks), dtype=torch.float64, device=logits.device)
    thresholds = temperatures, threshold_values, threshold_ids
    blocks = block_best, block_ids, block_weights
    _BLOCKS.launch((rows, num_blocks), logits, logits.stride(0), vocab, *thresholds, *blocks)
    _rows(num_blocks).launch((rows,), out, logits, logits.stride(0), tokens, *thresholds, *blocks, num_blocks)
