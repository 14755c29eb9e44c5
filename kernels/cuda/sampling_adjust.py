"""Changes logits before a token is chosen: masks of allowed tokens, then biases and penalties.

Dimension letters: R rows; V vocabulary; M masks; W 32-bit words of a mask; N entries, all rows together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.compile_spec import CompileSpec, Variant

MASK_BLOCK = 1024
ENTRY_BLOCK = 256

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


@triton.jit(do_not_specialize=["num_entries"])
def penalty_kernel(
    logits,  # [R, V]; mutated
    logits_stride,
    rows,  # [N]
    ids,  # [N]
    biases,  # [N]
    divisors,  # [N]
    losses,  # [N]
    num_entries,
    BLOCK: tl.constexpr,
):
    """Some of the entries, of any rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    within = at < num_entries
    where = logits + tl.load(rows + at, mask=within, other=0).to(tl.int64) * logits_stride
    where += tl.load(ids + at, mask=within, other=0)
    old = tl.load(where, mask=within, other=float("-inf"))
    bias = tl.load(biases + at, mask=within, other=0.0)
    divisor = tl.load(divisors + at, mask=within, other=1.0)
    loss = tl.load(losses + at, mask=within, other=0.0)
    # Each step is computed in float64 and rounded once, as on the CPU.
    value = kept_finite(old.to(tl.float64) + bias).to(tl.float64)
    value = kept_finite(tl.where(value > 0, value / divisor, value * divisor)).to(tl.float64)
    new = kept_finite(value - loss)
    forbidden = (old == float("-inf")) | (bias == float("-inf"))
    tl.store(where, tl.where(forbidden, float("-inf"), new), mask=within)


_MASK = Variant(mask_kernel, {"BLOCK": MASK_BLOCK}, num_warps=4, num_stages=1)
_PENALTIES = Variant(penalty_kernel, {"BLOCK": ENTRY_BLOCK}, num_warps=4, num_stages=1)


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
    grid = len(mask_rows), triton.cdiv(vocab, MASK_BLOCK)
    _MASK.launch(grid, logits, logits.stride(0), vocab, mask_rows, words, words.shape[1])


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    biases: torch.Tensor,
    divisors: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """Change the logits of single tokens: add a bias, then divide (multiply, if not positive), then subtract.

    Each of the three is computed in float64, rounded to float32 once, and kept finite; a token that was
    forbidden, or whose bias is -infinity, is forbidden. Checks nothing and reads no device tensor. Mutates
    `logits`, at the entries only.

    Args:
        logits: [R, V] float32; rows at any stride, tokens contiguous.
        rows: [N] int32 or int64, the row of each entry.
        ids: [N] int32 or int64, its token; no token of a row occurs twice.
        biases: [N] float64; 0: none.
        divisors: [N] float64, the repetition penalty; 1: none.
        losses: [N] float64, frequency and presence penalty together; 0: none.
    """
    if len(rows) == 0:
        return
    grid = (triton.cdiv(len(rows), ENTRY_BLOCK),)
    _PENALTIES.launch(grid, logits, logits.stride(0), rows, ids, biases, divisors, losses, len(rows))


def compile_specs() -> list[CompileSpec]:
    """The configurations that are shipped, for the check without a GPU."""
    mask = {"logits": "*fp32", "mask_rows": "*i32", "words": "*i32"}
    entry = {
        "logits": "*fp32",
        "rows": "*i32",
        "ids": "*i32",
        "biases": "*fp64",
        "divisors": "*fp64",
        "losses": "*fp64",
    }
    return [
        _spec(_MASK, "sampling_mask", mask, ("vocab", "num_words")),
        _spec(_PENALTIES, "sampling_penalties", entry, ("num_entries",)),
    ]


def _spec(variant: Variant, name: str, pointers: dict[str, str], sizes: tuple[str, ...]) -> CompileSpec:
    types = pointers | dict.fromkeys(("logits_stride", *sizes), "i32")
    return CompileSpec(variant, name, types, divisible_by_16=(*pointers, "logits_stride"))
