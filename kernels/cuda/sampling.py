"""Chooses one token for each row of logits: the most likely one, or a random one by the Gumbel-max method.

In the first kernel, a program chooses the best token of a block of the vocabulary. In the second, a program
chooses the best of these for a row. Nothing is sorted, and no probability is computed.

As in `workers/counter_rng.py`, the score of a token is (logit - best) / temperature + noise in float64, where
the noise is a function of the row's key and the token's id. The token with the highest score is chosen.
Devices whose logarithms differ in the last bit choose different tokens only if two scores differ that little.

Dimension letters: R rows; V vocabulary; B blocks of the vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import Variant

# The number of tokens of a program: a row of 152k tokens has 149 programs, for 132 multiprocessors.
BLOCK = 1024


@triton.jit
def gumbel(key, ids):
    """The noise of each token id, in float64: -log(-log1p(-uniform))."""
    # A uniform of 0 means [0, 2**-31). The middle of this interval is 2**-32.
    uniform = tl.maximum(tl.rand(key, ids).to(tl.float64), 2.3283064365386963e-10)
    # 1 - uniform is exact except for the next two values, which change the noise by 1e-7. So log1p is not
    # necessary.
    return -tl.log(-tl.log(1.0 - uniform))


@triton.jit
def filtered(values, ids, row, threshold_values, threshold_ids):
    """Logits of some tokens; -infinity for those below the row's threshold, if there are thresholds."""
    if threshold_values is not None:
        value = tl.load(threshold_values + row)
        kept = (values > value) | ((values == value) & (ids <= tl.load(threshold_ids + row)))
        values = tl.where(kept, values, float("-inf"))
    return values


@triton.jit
def choose_block_kernel(
    logits,  # [R, V]
    logits_stride,
    vocab,
    temperatures,  # [R]
    keys,  # [R]
    threshold_values,  # [R], or None
    threshold_ids,  # [R], or None
    block_ids,  # [R, B] the best token of each block
    block_logits,  # [R, B] its logit
    block_noise,  # [R, B] its noise
    block_best,  # [R, B] the largest logit, kept or not; NaN where one is NaN or +inf
    BLOCK: tl.constexpr,
):
    """Choose the best token of one block."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    out = row * tl.num_programs(1) + tl.program_id(1)
    lanes = tl.arange(0, BLOCK)  # [BLOCK]
    ids = first + lanes
    values = tl.load(
        logits + row * logits_stride + ids,
        mask=ids < vocab,
        other=float("-inf"),
    ).to(tl.float32)
    usable = values < float("inf")  # NaN is not less either
    all_usable = tl.min(usable.to(tl.int32), 0) == 1
    values = tl.where(usable, values, float("-inf"))
    best = tl.max(values, 0)
    values = filtered(values, ids, row, threshold_values, threshold_ids)

    # Relative to the block's best, so that large logits leave room for the noise; never -inf - -inf.
    origin = tl.where(best > float("-inf"), best, 0.0).to(tl.float64)
    scores = values.to(tl.float64) - origin  # [BLOCK]
    noise = tl.zeros([BLOCK], tl.float64)
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        noise = gumbel(tl.load(keys + row), ids)
        scores = scores / temperature + noise
    winner = tl.argmax(scores, 0)  # the lowest of equals
    tl.store(block_ids + out, first + winner)
    tl.store(block_logits + out, tl.sum(tl.where(lanes == winner, values, 0.0), 0))
    tl.store(block_noise + out, tl.sum(tl.where(lanes == winner, noise, 0.0), 0))
    tl.store(block_best + out, tl.where(all_usable, best, float("nan")))


# `out_best` may be a slice with any alignment, which must not compile another variant.
@triton.jit(do_not_specialize_on_alignment=["out_best"])
def choose_row_kernel(
    out_ids,  # [R]
    out_best,  # [R]
    temperatures,  # [R]
    block_ids,  # [R, B]
    block_logits,  # [R, B]
    block_noise,  # [R, B]
    block_best,  # [R, B]
    num_blocks,
    WIDTH: tl.constexpr,  # the power of two from B up
):
    """Choose the token of one row, among the best of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, WIDTH)  # [WIDTH]
    within = blocks < num_blocks
    at = row * num_blocks + blocks
    bests = tl.load(block_best + at, mask=within, other=float("-inf"))
    usable = bests < float("inf")
    all_usable = tl.min(usable.to(tl.int32), 0) == 1
    best = tl.max(tl.where(usable, bests, float("-inf")), 0)

    # As in the blocks, but relative to the row's best: these are the scores of the definition.
    origin = tl.where(best > float("-inf"), best, 0.0).to(tl.float64)
    scores = tl.load(block_logits + at, mask=within, other=float("-inf")).to(tl.float64) - origin
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        scores = scores / temperature + tl.load(block_noise + at, mask=within, other=0.0)
    winner = tl.argmax(scores, 0)  # the lowest of equals, and so the lowest id
    tl.store(out_ids + row, tl.load(block_ids + row * num_blocks + winner).to(tl.int64))
    tl.store(out_best + row, tl.where(all_usable, best, float("nan")))


_BLOCKS = Variant(choose_block_kernel, {"BLOCK": BLOCK}, num_warps=4, num_stages=1)


@cache
def _rows(num_blocks: int) -> Variant:
    constexprs = {"WIDTH": triton.next_power_of_2(num_blocks)}
    return Variant(choose_row_kernel, constexprs, num_warps=4, num_stages=1)


def choose(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    out_ids: torch.Tensor,
    out_best: torch.Tensor,
    threshold_values: torch.Tensor | None = None,
    threshold_ids: torch.Tensor | None = None,
) -> None:
    """Choose one token for each row.

    Checks nothing, reads no device tensor, and launches what follows from the shapes alone: it can be
    captured in a CUDA graph. Mutates `out_ids` and `out_best`. Of equals, in logits or in scores, the lowest
    id is chosen.

    Args:
        logits: [R, V] float32, bfloat16 or float16, V >= 1; rows at any stride, tokens contiguous.
        temperatures: [R] float32 or float64. 0 or less: the most likely token.
        keys: [R] int64, the bits of the uint64 from `workers.counter_rng.mix_key`; not read for greedy rows.
        out_ids: [R] int64. Meaningless where `out_best` is not finite, but inside the vocabulary.
        out_best: [R] float32, the largest logit, kept or not: -inf where all are, NaN where one is
            NaN or +infinity.
        threshold_values: [R] float32, None to keep all tokens. Kept are tokens with a larger logit, and
        threshold_ids: [R] int32, those with this very logit and an id up to this one.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    num_blocks = triton.cdiv(vocab, BLOCK)
    block_ids = torch.empty((rows, num_blocks), dtype=torch.int32, device=logits.device)
    block_logits = torch.empty((rows, num_blocks), dtype=torch.float32, device=logits.device)
    block_noise = torch.empty((rows, num_blocks), dtype=torch.float64, device=logits.device)
    block_best = torch.empty((rows, num_blocks), dtype=torch.float32, device=logits.device)
    _BLOCKS.launch(
        (rows, num_blocks),
        logits,
        logits.stride(0),
        vocab,
        temperatures,
        keys,
        threshold_values,
        threshold_ids,
        block_ids,
        block_logits,
        block_noise,
        block_best,
    )
    _rows(num_blocks).launch(
        (rows,),
        out_ids,
        out_best,
        temperatures,
        block_ids,
        block_logits,
        block_noise,
        block_best,
        num_blocks,
    )
