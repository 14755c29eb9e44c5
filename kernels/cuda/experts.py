"""Mixture of experts on a GPU, with the roundings of `kernels.experts`: two grouped products, a weighted sum.

Pairs of a token and one of its experts are sorted by expert (`kernels.cuda.routing`). A program of the
grouped product computes N outputs for M pairs of one expert. It finds its expert from the index at which the
pairs of each expert begin. The grid depends on T, k and E only, and is large enough for any distribution over
experts. Programs without pairs return. The host reads nothing back, so a launch can be captured in a CUDA
graph.

The bits of a row depend on M, N and K, and not on the rest of the batch. `config_for` has one configuration
for few pairs per expert, and one for many, which is used for all if bits must not depend on their number.

Matrices that are quantised (`kernels.gpu_experts`) are dequantised in registers for few pairs per expert. For
many, those of some experts at a time are dequantised into memory, and multiplied as dense ones: of experts
that have pairs, and only their pairs.

Launches begin early (`kernels.cuda.dependent_launch`).

Dimension letters: T tokens; C hidden width; I intermediate width; E experts; k experts of a token; P pairs,
T * k; M pairs, N outputs and K inputs of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.dependent_launch import wait
from kernels.cuda.dequantise import dequantise
from kernels.cuda.dequantise import tile as tile_of
from kernels.cuda.gated_activation import gated_activation
from kernels.cuda.routing import group
from kernels.cuda.variant import Variant
from kernels.few_rows import Quantised
from kernels.gated_activation import UNGATED, Activation, gated_activation_reference
from kernels.gpu_experts import GpuExperts
from kernels.gpu_format import GpuFormat
from kernels.gpu_weight import SCRATCH_BYTES, GpuWeight

Biases = tuple[torch.Tensor, torch.Tensor]
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


def config_for(dtype: torch.dtype, *, few: bool, quantised: bool = False) -> TileConfig:
    """The tiles for few pairs per expert, or many. They fit the shared memory of each architecture.

    `quantised`: matrices are dequantised in registers, which is for few pairs.
    """
    if quantised:
        return TileConfig(16, 32, 32 if dtype is torch.float32 else 128, 4, 5)
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


# The matrices of some experts may begin anywhere among those of all.
@triton.jit(do_not_specialize_on_alignment=["starts"])
def grouped_product_kernel(
    out,  # [P, OUTPUTS] contiguous, written
    x,  # [T, INPUTS] with GATHER, else [P, INPUTS]
    weight,  # [EXPERTS, OUTPUTS, ROW] contiguous: inputs; or with FORM uint8, bytes of rows
    table,  # see `kernels.cuda.dequantise.tile`
    bias,  # [EXPERTS, OUTPUTS] contiguous, or None
    pairs,  # [P] pair numbers, token * TOP_K + choice, sorted by expert
    starts,  # [EXPERTS + 1] where those of each expert begin
    x_stride,
    GATHER: tl.constexpr,  # rows of x are tokens, and those of out sorted pairs; else the other way round
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    E: tl.constexpr,  # the power of two not below EXPERTS
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,  # a GpuFormat, or None: weights have the dtype of x
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
    weight_rows = weight + expert.to(tl.int64) * (OUTPUTS * ROW) + output.to(tl.int64)[:, None] * ROW
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, INPUTS, K):
        column = start + tl.arange(0, K)[None, :]  # [1, K]
        is_input = column < INPUTS
        rows = tl.load(x_rows + column, mask=present[:, None] & is_input, other=0.0)  # [M, K]
        if FORM is None:
            matrix = tl.load(weight_rows + column, mask=is_output[:, None] & is_input, other=0.0)  # [N, K]
        else:
            matrix = tile_of(weight_rows, table, is_output[:, None], start, INPUTS, FORM, N, K).to(rows.dtype)
        total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
    if bias is not None:
        offsets = tl.load(bias + expert.to(tl.int64) * OUTPUTS + output, mask=is_output, other=0.0)
        total += offsets.to(tl.float32)[None, :]
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
    config: TileConfig,
    experts: int,
    outputs: int,
    inputs: int,
    row: int,
    top_k: int,
    form: GpuFormat | None,
    *,
    gather: bool,
) -> Variant:
    constexprs = {
        "GATHER": gather,
        "TOP_K": top_k,
        "EXPERTS": experts,
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "ROW": row,
        "E": triton.next_power_of_2(experts),
        "M": config.pairs,
        "N": config.outputs,
        "K": config.inputs,
        "FORM": form,
    }
    return Variant(grouped_product_kernel, constexprs, config.num_warps, config.num_stages, early=True)


@cache
def _sum(top_k: int, width: int) -> Variant:
    constexprs = {"TOP_K": top_k, "WIDTH": width, "B": BLOCK}
    return Variant(weighted_sum_kernel, constexprs, num_warps=4, num_stages=1, early=True)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Which row is multiplied by the matrix of which expert.

    Attributes:
        numbers: [P] int32, sorted by expert.
        starts: [E + 1] int32, where those of each expert begin.
        top_k: k.
        few: Whether there are few of each expert.
    """

    numbers: torch.Tensor
    starts: torch.Tensor
    top_k: int
    few: bool

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | GpuExperts,
        bias: torch.Tensor | None,
        *,
        gather: bool,
    ) -> torch.Tensor:
        """Multiply each pair's row of x by the matrix of its expert.

        Args:
            x: [T, INPUTS], rows of tokens, with `gather`; else [P, INPUTS], rows of sorted pairs.
            weight: [E, OUTPUTS, INPUTS], contiguous if it is a tensor.
            bias: [E, OUTPUTS] contiguous; None: there is none.
            gather: Which way.

        Returns:
            A new tensor [P, OUTPUTS]: rows of sorted pairs with `gather`, else of pairs in their own order.
        """
        if isinstance(weight, torch.Tensor):
            out = torch.empty(len(self.numbers), weight.shape[1], dtype=x.dtype, device=x.device)
            self._launch(out, x, weight, bias, self.starts, gather=gather)
            return out
        count = len(weight)
        sizes = [len(stack) // count for stack in weight.stacks]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes, dim=1)
        multiply = self._in_registers if self.few else self._some_at_a_time
        found = [
            multiply(x, stack, None if own is None else own.contiguous(), count, gather=gather)
            for stack, own in zip(weight.stacks, biases, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _in_registers(
        self, x: torch.Tensor, stack: GpuWeight, bias: torch.Tensor | None, count: int, *, gather: bool
    ) -> torch.Tensor:
        """`multiply` by equal parts of the rows of a weight; `count`: how many."""
        weight = stack.data.view(count, -1, stack.data.shape[1])
        out = torch.empty(len(self.numbers), weight.shape[1], dtype=x.dtype, device=x.device)
        self._launch(out, x, weight, bias, self.starts, gather=gather, quantised=stack.quantised)
        return out

    def _some_at_a_time(
        self, x: torch.Tensor, stack: GpuWeight, bias: torch.Tensor | None, count: int, *, gather: bool
    ) -> torch.Tensor:
        """The same, with the matrices of as many experts in memory as SCRATCH_BYTES has room for."""
        outputs, inputs = len(stack) // count, stack.shape[1]
        out = torch.empty(len(self.numbers), outputs, dtype=x.dtype, device=x.device)
        room = SCRATCH_BYTES // (outputs * inputs * x.itemsize)
        # Equal numbers of experts, for which one variant is compiled.
        some = next(size for size in range(max(1, min(room, count)), 0, -1) if count % size == 0)
        for first in range(0, count, some):
            starts, rows = self.starts[first:], range(first * outputs, (first + some) * outputs)
            dense = dequantise(
                stack.data, *stack.quantised, rows, inputs, x.dtype, starts=starts, rows_of_expert=outputs
            )
            own = None if bias is None else bias[first : first + some]
            self._launch(out, x, dense.view(some, outputs, inputs), own, starts, gather=gather)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        starts: torch.Tensor,
        *,
        gather: bool,
        quantised: Quantised | None = None,
    ) -> None:
        """Write the rows of `out` whose experts have these matrices. `starts`: those of the first on."""
        (experts, outputs, row), inputs, pairs = weight.shape, x.shape[1], len(self.numbers)
        config = config_for(x.dtype, few=self.few, quantised=quantised is not None)
        # The most blocks of any distribution: one for each expert with a pair, and one for each further M.
        begun = min(experts, pairs)
        blocks = begun + (pairs - begun) // config.pairs
        form, table = (None, None) if quantised is None else quantised
        variant = _product(config, experts, outputs, inputs, row, self.top_k, form, gather=gather)
        grid = (blocks * triton.cdiv(outputs, config.outputs),)
        variant.launch(grid, out, x, weight, table, bias, self.numbers, starts, x.stride(0))


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | GpuExperts,
    down: torch.Tensor | GpuExperts,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: Activation,
    *,
    biases: Biases | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Launch the kernels; see `kernels.experts.experts`. Arguments are checked.

    Reads nothing back from the device.
    """
    tokens, top_k = expert_ids.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    gate_up_bias, down_bias = biases or (None, None)
    few = tokens * top_k <= FEW_PAIRS * len(gate_up) and not batch_invariant
    pairs = _Pairs(*group(expert_ids.contiguous(), len(gate_up)), top_k, few)
    inner = pairs.multiply(x, gate_up, gate_up_bias, gather=True)  # [P, 2 * I], or [P, I] without gates
    activated = gated_activation_reference if activation == UNGATED else gated_activation
    outputs = pairs.multiply(activated(inner, activation), down, down_bias, gather=False)  # [P, C]
    variant = _sum(top_k, x.shape[1])
    grid = (tokens * triton.cdiv(x.shape[1], BLOCK),)
    variant.launch(grid, out, outputs, expert_weights, expert_weights.stride(0))
    return out
