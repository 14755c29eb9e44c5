"""Mixture of experts on a GPU, with the roundings of `kernels.experts`: two grouped products, a weighted sum.

Pairs of a token and one of its experts are sorted by expert (`kernels.cuda.routing`). A program of the
grouped product computes N outputs for M pairs of one expert. It finds its expert from the index at which the
pairs of each expert begin. The grid depends on T, k and E only, and is large enough for any distribution over
experts. Programs without pairs return. The host reads nothing back, so a launch can be captured in a CUDA
graph.

The bits of a row depend on M, N and K, and not on the rest of the batch. `config_for` has one configuration
for few pairs per expert, and one for many, which is used for all if bits must not depend on their number.

Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; C hidden width; I intermediate width; E experts; k experts of a token; P pairs,
T * k; M pairs, N outputs and K inputs of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.gated_activation import gated_activation
from kernels.cuda.routing import group
from kernels.cuda.variant import Variant
from kernels.gated_activation import CUDA_ACTIVATIONS, Activation, gated_activation_reference

# The number of columns of a program of the weighted sum.
BLOCK = 1024
# Up to this average number of pairs per expert, tiles have the rows of one tensor-core instruction.
FEW_PAIRS = 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile sizes and compile options of the grouped product."""

    pairs: int  # M
    outputs: int  # N
    inputs: int  # K
    num_warps: int
    num_stages: int


def config_for(dtype: torch.dtype, pairs: int, experts: int, *, batch_invariant: bool) -> TileConfig:
    """The tiles for a number of pairs, of all experts. They fit the shared memory of each architecture."""
    few = pairs <= FEW_PAIRS * experts and not batch_invariant
    if dtype is torch.float32:
        # Computed without tensor cores, which do not have the precision of float32.
        return TileConfig(16, 64, 32, 4, 3) if few else TileConfig(64, 64, 32, 4, 3)
    return TileConfig(16, 64, 128, 4, 4) if few else TileConfig(64, 128, 64, 4, 4)


@triton.jit
def find_pairs(starts, block, E: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr):
    """The expert of a block of M pairs, its first pair, and the end of the expert's pairs.

    E is the power of two not below EXPERTS. Blocks are in the order of experts. After the last block, the
    expert is EXPERTS or more.
    """
    expert = tl.arange(0, E)
    begin = tl.load(starts + expert, mask=expert < EXPERTS, other=0).to(tl.int32)
    end = tl.load(starts + expert + 1, mask=expert < EXPERTS, other=0).to(tl.int32)
    blocks = (end - begin + M - 1) // M  # [E]
    ends = tl.cumsum(blocks, 0)  # [E], in blocks
    found = tl.sum((ends <= block).to(tl.int32), 0)
    is_found = expert == found
    before = tl.sum(tl.where(is_found, ends - blocks, 0), 0)
    first = tl.sum(tl.where(is_found, begin, 0), 0) + (block - before) * M
    return found, first, tl.sum(tl.where(is_found, end, 0), 0)


@triton.jit
def grouped_product_kernel(
    out,  # [P, OUTPUTS] contiguous, written
    x,  # [T, INPUTS] with GATHER, else [P, INPUTS]
    weight,  # [EXPERTS, OUTPUTS, INPUTS] contiguous
    pairs,  # [P] pair numbers, token * TOP_K + choice, sorted by expert
    starts,  # [EXPERTS + 1] where those of each expert begin
    x_stride,
    GATHER: tl.constexpr,  # rows of x are tokens, and those of out sorted pairs; else the other way round
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    E: tl.constexpr,  # the power of two not below EXPERTS
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """M pairs of one expert, and N outputs."""
    wait(EARLY)
    tiles: tl.constexpr = (OUTPUTS + N - 1) // N
    # The programs of the same pairs have consecutive numbers, since they read the same rows of x.
    expert, first, end = find_pairs(starts, tl.program_id(0) // tiles, E, EXPERTS, M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, M)  # [M]
    present = place < end
    pair = tl.load(pairs + place, mask=present, other=0).to(tl.int64)
    place = place.to(tl.int64)
    output = tl.program_id(0) % tiles * N + tl.arange(0, N)  # [N]
    is_output = output < OUTPUTS
    x_rows = x + (pair // TOP_K if GATHER else place)[:, None] * x_stride
    weight_rows = weight + expert.to(tl.int64) * (OUTPUTS * INPUTS) + output.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, INPUTS, K):
        column = start + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < INPUTS
        rows = tl.load(x_rows + column, mask=present[:, None] & is_input, other=0.0)  # [M, K]
        matrix = tl.load(weight_rows + column, mask=is_output[:, None] & is_input, other=0.0)  # [N, K]
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
    out_row = place if GATHER else pair
    written = out + out_row[:, None] * OUTPUTS + output[None, :]
    tl.store(written, total.to(out.dtype.element_ty), mask=present[:, None] & is_output[None, :])


@triton.jit
def weighted_sum_kernel(
    out,  # [T, C] contiguous, written
    outputs,  # [T, k, C] contiguous
    weights,  # [T, k]
    weights_stride,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,  # C
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """B columns of one token."""
    wait(EARLY)
    blocks: tl.constexpr = (WIDTH + B - 1) // B
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * B + tl.arange(0, B)  # [B]
    mask = column < WIDTH
    total = tl.zeros([B], tl.float32)
    for choice in tl.static_range(TOP_K):
        values = tl.load(outputs + (token * TOP_K + choice) * WIDTH + column, mask=mask, other=0.0)
        weight = tl.load(weights + token * weights_stride + choice)
        total += values.to(tl.float32) * weight.to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


@cache
def _product(
    config: TileConfig, experts: int, outputs: int, inputs: int, top_k: int, *, gather: bool
) -> Variant:
    constexprs = {
        "GATHER": gather,
        "TOP_K": top_k,
        "EXPERTS": experts,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "E": triton.next_power_of_2(experts),
        "M": config.pairs,
        "N": config.outputs,
        "K": config.inputs,
    }
    return Variant(grouped_product_kernel, constexprs, config.num_warps, config.num_stages, early=True)


@cache
def _sum(top_k: int, width: int) -> Variant:
    constexprs = {"TOP_K": top_k, "WIDTH": width, "B": BLOCK}
    return Variant(weighted_sum_kernel, constexprs, num_warps=4, num_stages=1, early=True)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    pairs: torch.Tensor,
    starts: torch.Tensor,
    top_k: int,
    *,
    gather: bool,
    batch_invariant: bool,
) -> torch.Tensor:
    """Multiply each pair's row of x by the matrix of its expert.

    Args:
        x: [T, INPUTS], rows of tokens, with `gather`; else [P, INPUTS], rows of sorted pairs.
        weight: [E, OUTPUTS, INPUTS] contiguous.
        pairs: [P] int32, sorted by expert.
        starts: [E + 1] int32, where those of each expert begin.
        top_k: k.
        gather: Which way.
        batch_invariant: Use one configuration for any number of pairs.

    Returns:
        A new tensor [P, OUTPUTS]: rows of sorted pairs with `gather`, else of pairs in their own order.
    """
    experts, outputs, inputs = weight.shape
    config = config_for(x.dtype, len(pairs), experts, batch_invariant=batch_invariant)
    out = torch.empty(len(pairs), outputs, dtype=x.dtype, device=x.device)
    # The most blocks of any distribution: one for each expert with a pair, and one for each further M pairs.
    begun = min(experts, len(pairs))
    blocks = begun + (len(pairs) - begun) // config.pairs
    variant = _product(config, experts, outputs, inputs, top_k, gather=gather)
    variant.launch(
        (blocks * triton.cdiv(outputs, config.outputs),), out, x, weight, pairs, starts, x.stride(0)
    )
    return out


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: Activation,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launch the kernels; see `kernels.experts.experts`. Arguments are checked, weights are single tensors.

    Reads nothing back from the device.
    """
    tokens, top_k = expert_ids.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    pairs, starts = group(expert_ids.contiguous(), len(gate_up))
    multiply = partial(_multiply, pairs=pairs, starts=starts, top_k=top_k, batch_invariant=batch_invariant)
    inner = multiply(x, gate_up, gather=True)  # [P, 2 * I], or [P, I] without gates
    activated = gated_activation if activation in CUDA_ACTIVATIONS else gated_activation_reference
    outputs = multiply(activated(inner, activation), down, gather=False)  # [P, C]
    variant = _sum(top_k, x.shape[1])
    grid = (tokens * triton.cdiv(x.shape[1], BLOCK),)
    variant.launch(grid, out, outputs, expert_weights, expert_weights.stride(0))
    return out
