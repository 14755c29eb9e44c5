"""Changes logits before a token is chosen: masks of allowed tokens, then biases, then penalties.

For penalties, the tokens of each history are counted in a table of the vocabulary, which is then gone
through: so neither the host nor the device sorts them. Decode graphs keep these tables, and add the token of
each step.

Dimension letters: R rows; V vocabulary; M masks; W 32-bit words of a mask; N biases, all rows together;
P rows with penalties; H tokens of all their histories; B rows of a batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import Variant

BLOCK = 1024
BIAS_BLOCK = 256
ROWS_BLOCK = 128
# How many programs count the tokens of a history together.
COUNT_PROGRAMS = 16

# In the counts of tokens: it occurs, in the prompt or after it. The bits below count how often after it.
_OCCURS = tl.constexpr(1 << 30)

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def mask_kernel(
    logits,  # [R, V]; mutated
    logits_stride,
    vocab,
    mask_rows,  # [M]
    words,  # [M, W]
    num_words,
    BLOCK: tl.constexpr,
):
    """One block of the vocabulary under one mask."""
    mask = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    packed = tl.load(words + mask * num_words + ids // 32, mask=ids < vocab, other=-1)
    forbidden = ((packed >> (ids % 32)) & 1) == 0
    row = tl.load(mask_rows + mask).to(tl.int64)
    tl.store(
        logits + row * logits_stride + ids,
        tl.full([BLOCK], float("-inf"), tl.float32),
        mask=forbidden & (ids < vocab),
    )


@triton.jit
def kept_finite(values):
    """float64 rounded to float32, with the largest finite value instead of infinity."""
    return tl.minimum(tl.maximum(values, -_FLOAT32_MAX), _FLOAT32_MAX).to(tl.float32)


@triton.jit(do_not_specialize=["num_biases"])
def bias_kernel(
    logits,  # [R, V]; mutated
    logits_stride,
    rows,  # [N]
    ids,  # [N]
    biases,  # [N]
    num_biases,
    BLOCK: tl.constexpr,
):
    """Some of the biases, of any rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    within = at < num_biases
    where = logits + tl.load(rows + at, mask=within, other=0).to(tl.int64) * logits_stride
    where += tl.load(ids + at, mask=within, other=0)
    old = tl.load(where, mask=within, other=float("-inf"))
    bias = tl.load(biases + at, mask=within, other=0.0)
    forbidden = (old == float("-inf")) | (bias == float("-inf"))
    tl.store(where, tl.where(forbidden, float("-inf"), kept_finite(old.to(tl.float64) + bias)), mask=within)


@triton.jit
def count_kernel(
    counts,  # [P, V]; mutated
    vocab,
    history,  # [H]
    begins,  # [P]
    prompt_ends,  # [P]
    ends,  # [P]
    BLOCK: tl.constexpr,
):
    """Some of the tokens of one history: every so many blocks of them one."""
    index = tl.program_id(0).to(tl.int64)
    prompt_end, end = tl.load(prompt_ends + index), tl.load(ends + index)
    begin = tl.load(begins + index) + tl.program_id(1) * BLOCK
    for first in range(begin, end, BLOCK * tl.num_programs(1)):
        at = first + tl.arange(0, BLOCK)  # [BLOCK]
        ids = tl.load(history + at, mask=at < end, other=-1)
        within = (ids >= 0) & (ids < vocab)
        tl.atomic_or(counts + index * vocab + ids, tl.full([BLOCK], _OCCURS, tl.int32), mask=within)
        is_recent = within & (at >= prompt_end)
        tl.atomic_add(counts + index * vocab + ids, tl.full([BLOCK], 1, tl.int32), mask=is_recent)


@triton.jit(do_not_specialize=["num_rows"])
def count_next_kernel(
    counts,  # [P, V]; mutated
    vocab,
    rows,  # [P]
    counted_from,  # [P]
    token_ids,  # [B]
    positions,  # [B]
    num_rows,  # P
    BLOCK: tl.constexpr,
):
    """One token each of some rows."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = index < num_rows
    row = tl.load(rows + index, mask=inside, other=0)
    token = tl.load(token_ids + row, mask=inside, other=-1)
    within = inside & (token >= 0) & (token < vocab)
    is_recent = tl.load(positions + row, mask=inside, other=0) >= tl.load(
        counted_from + index, mask=inside, other=0
    )
    at = counts + index.to(tl.int64) * vocab + token
    count = tl.load(at, mask=within, other=0) | _OCCURS
    tl.store(at, count + is_recent.to(tl.int32), mask=within)


@triton.jit
def penalty_kernel(
    logits,  # [R, V]; mutated
    logits_stride,
    vocab,
    counts,  # [P, V]
    rows,  # [P]
    repetitions,  # [P]
    frequencies,  # [P]
    presences,  # [P]
    BLOCK: tl.constexpr,
):
    """One block of the vocabulary of one row."""
    index = tl.program_id(0).to(tl.int64)
    repetition, frequency = tl.load(repetitions + index), tl.load(frequencies + index)
    presence = tl.load(presences + index)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        count = tl.load(counts + index * vocab + ids, mask=ids < vocab, other=0)
        occurs = count > 0
        where = logits + tl.load(rows + index).to(tl.int64) * logits_stride + ids
        old = tl.load(where, mask=occurs, other=float("-inf"))
        # Both are computed in float64 and rounded once, as on the CPU.
        value = old.to(tl.float64)
        value = kept_finite(tl.where(value > 0, value / repetition, value * repetition)).to(tl.float64)
        recent = (count & (_OCCURS - 1)).to(tl.float64)
        loss = recent * frequency + presence
        new = kept_finite(value - tl.where(recent > 0, loss, 0.0))
        tl.store(where, tl.where(old == float("-inf"), old, new), mask=occurs)


_MASK = Variant(mask_kernel, {"BLOCK": BLOCK}, num_warps=4, num_stages=1)
_BIASES = Variant(bias_kernel, {"BLOCK": BIAS_BLOCK}, num_warps=4, num_stages=1)
_COUNTS = Variant(count_kernel, {"BLOCK": BLOCK}, num_warps=4, num_stages=1)
_NEXT = Variant(count_next_kernel, {"BLOCK": ROWS_BLOCK}, num_warps=4, num_stages=1)
_PENALTIES = Variant(penalty_kernel, {"BLOCK": BLOCK}, num_warps=4, num_stages=1)


def apply_masks(logits: torch.Tensor, mask_rows: torch.Tensor, words: torch.Tensor) -> None:
    """Forbid tokens: their logits become -infinity.

    Checks nothing and reads no device tensor. Mutates `logits`, in the named rows only.

    Args:
        logits: [R, V] float32; rows at any stride, tokens contiguous.
        mask_rows: [M] int32 or int64, the row each mask is for, none of them twice.
        words: [M, W] int32 contiguous, W >= V / 32; token i is allowed if bit i % 32 of word i // 32 is 1.
    """
    if len(mask_rows) == 0:
        return
    vocab = logits.shape[1]
    grid = len(mask_rows), triton.cdiv(vocab, BLOCK)
    _MASK.launch(grid, logits, logits.stride(0), vocab, mask_rows, words, words.shape[1])


def apply_biases(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, biases: torch.Tensor) -> None:
    """Add biases to the logits of single tokens.

    The sum is computed in float64, rounded to float32 once, and kept finite; a token that was forbidden, or
    whose bias is -infinity, is forbidden. Checks nothing and reads no device tensor. Mutates `logits`, at
    these tokens only.

    Args:
        logits: [R, V] float32; rows at any stride, tokens contiguous.
        rows: [N] int32 or int64, the row of each bias.
        ids: [N] int32 or int64, its token; no token of a row occurs twice.
        biases: [N] float64.
    """
    if len(rows) == 0:
        return
    grid = (triton.cdiv(len(rows), BIAS_BLOCK),)
    _BIASES.launch(grid, logits, logits.stride(0), rows, ids, biases, len(rows))


def count_histories(
    counts: torch.Tensor,
    history: torch.Tensor,
    begins: torch.Tensor,
    prompt_ends: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Count the tokens of histories, for `apply_penalties`.

    Checks nothing and reads no device tensor. Mutates `counts`.

    Args:
        counts: [P, V] int32 contiguous, zeros.
        history: [H] int32, the tokens of all histories. Those outside of the vocabulary are ignored.
        begins: [P] int64, where each row's begins; rows may share one.
        prompt_ends: [P] int64, from where on frequencies and presences count.
        ends: [P] int64, where it ends: less than 2**30 tokens later.
    """
    if len(counts):
        grid = len(counts), COUNT_PROGRAMS
        _COUNTS.launch(grid, counts, counts.shape[1], history, begins, prompt_ends, ends)


def count_next(
    counts: torch.Tensor,
    rows: torch.Tensor,
    counted_from: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Count one token more of each row.

    Checks nothing and reads no device tensor. Mutates `counts`.

    Args:
        counts: [P, V] int32 contiguous, of `count_histories`.
        rows: [P] int64, which row of a batch each is.
        counted_from: [P] int64, the position from which on frequencies and presences count.
        token_ids: [B] int64, the tokens of the batch. Those outside of the vocabulary are ignored.
        positions: [B] int64, their positions in their sequences.
    """
    if len(counts):
        grid = (triton.cdiv(len(counts), ROWS_BLOCK),)
        _NEXT.launch(grid, counts, counts.shape[1], rows, counted_from, token_ids, positions, len(counts))


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    repetitions: torch.Tensor,
    frequencies: torch.Tensor,
    presences: torch.Tensor,
) -> None:
    """Change the logits of tokens that were counted: divide them (multiply, if not positive), then subtract.

    Both are computed in float64, rounded to float32 once, and kept finite; a token that was forbidden stays
    so. The counts of a row whose settings have no effect are not read. Checks nothing and reads no device
    tensor. Mutates `logits`, in the named rows only.

    Args:
        logits: [R, V] float32; rows at any stride, tokens contiguous.
        rows: [P] int32 or int64, none of them twice.
        counts: [P, V] int32 contiguous, of `count_histories`.
        repetitions: [P] float64, what the logit of a token that occurs is divided by; 1: none.
        frequencies: [P] float64, what is subtracted for each time that it occurs; 0: none.
        presences: [P] float64, what is subtracted if it occurs; 0: none.
    """
    if len(rows) == 0:
        return
    vocab = logits.shape[1]
    grid = len(rows), triton.cdiv(vocab, BLOCK)
    settings = repetitions, frequencies, presences
    _PENALTIES.launch(grid, logits, logits.stride(0), vocab, counts, rows, *settings)
