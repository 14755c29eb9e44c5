"""Low-rank adapters on a GPU: y += (x A^T) B^T, with an adapter of its own for each row, or none.

Rows are sorted by the slot of their adapter. A program computes a tile of M rows of one slot, so an adapter
is read once for each M of its rows. The grid depends on T and S only, and is large enough for any
distribution over slots. Programs without rows return. The host reads nothing back, so the launches can be
captured in a CUDA graph, and replayed with other slots and other adapters.

x A^T is summed in float32 over a fixed number of splits of the inputs, which are added up in order. There is
one configuration for any number of rows, so the bits of a row do not depend on the others. Beyond the rank of
an adapter nothing is read.

The tiles were not tuned on a GPU.

Dimension letters: T rows; I inputs; O outputs; S slots; P parts of the outputs, with an A and a B each; R the
largest rank of a slot; C splits; M rows, N ranks or outputs, and K inputs or ranks of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl

from kernels.cuda.experts import find_pairs
from kernels.cuda.variant import Variant
from kernels.lora_pairs import LoraPairs, SortedRows

# M, and N of the second kernel.
M = 32
OUTPUTS = 64
# The inputs of a split, unless there were more than MAX_SPLITS then. More splits would use more
# multiprocessors for few rows, and more memory for many.
SPLIT_INPUTS = 1024
MAX_SPLITS = 8


class StackedLora:
    """The adapters of one projection, in device memory that never moves.

    Attributes:
        inputs: I.
        outputs: The number of outputs of each part.
        offsets: Where each part of the outputs begins, and O.
        a: [S, P, R, I]; only the ranks that a slot has are read.
        b: [S, O, R], likewise.
        ranks: [S, P] int32; 0: the part has no adapter.
    """

    def __init__(
        self,
        slots: int,
        max_rank: int,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate empty slots; see `kernels.lora.new_table`."""
        self.inputs, self.outputs = inputs, tuple(outputs)
        self.offsets = (0, *accumulate(outputs))
        rank = max_rank + max_rank % 2  # as `LoraPairs` rounds
        self.a = torch.zeros(slots, len(outputs), rank, inputs, dtype=dtype, device=device)
        self.b = torch.zeros(slots, self.offsets[-1], rank, dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, len(outputs), dtype=torch.int32, device=device)

    @torch.inference_mode()
    def set(self, slot: int, pairs: LoraPairs | None) -> None:
        """Copy an adapter into a slot, for launches after this call. None: the slot is empty then.

        Args:
            slot: Below S.
            pairs: Not packed, of ranks up to R, on any device.
        """
        if pairs is not None:
            matrices = zip(torch.split(pairs.a.plain, list(pairs.ranks)), pairs.b, strict=True)
            for part, (a, b) in enumerate(matrices):
                if b is not None:
                    self.a[slot, part, : len(a)].copy_(a)
                    self.b[slot, self.offsets[part] : self.offsets[part + 1], : len(a)].copy_(b.plain)
        ranks = (0,) * len(self.outputs) if pairs is None else pairs.ranks
        self.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32))


@triton.jit
def shrink_kernel(
    partials,  # [T, SPLITS, PARTS, RANK] float32, in the order of `rows`; written up to the ranks of the slot
    x,  # [T, INPUTS] contiguous
    a,  # [SLOTS, PARTS, RANK, INPUTS] contiguous
    ranks,  # [SLOTS, PARTS]
    rows,  # [T], sorted by slot
    starts,  # [SLOTS + 1] where those of each slot begin
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,  # inputs of a split, a multiple of K
    E: tl.constexpr,  # the power of two not below SLOTS
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One split of x A^T for M rows of one slot, and N ranks of one part."""
    tiles: tl.constexpr = (RANK + N - 1) // N  # of a part
    slot, first, end = find_pairs(starts, tl.program_id(0) // (tiles * PARTS * SPLITS), E, SLOTS, M)
    if slot >= SLOTS:
        return
    split = tl.program_id(0) % SPLITS
    part = tl.program_id(0) // SPLITS % PARTS
    tile = tl.program_id(0) // (SPLITS * PARTS) % tiles
    ranks_of_part = tl.load(ranks + slot * PARTS + part)
    if tile * N >= ranks_of_part:
        return
    rank = tile * N + tl.arange(0, N)  # [N]
    is_rank = rank < ranks_of_part
    place = first + tl.arange(0, M)  # [M]
    present = place < end
    x_rows = x + tl.load(rows + place, mask=present, other=0).to(tl.int64)[:, None] * INPUTS
    column = part * RANK + rank  # of [PARTS, RANK]
    a_rows = a + (slot.to(tl.int64) * (PARTS * RANK) + column)[:, None] * INPUTS
    total = tl.zeros([M, N], tl.float32)
    for start in range(split * LENGTH, (split + 1) * LENGTH, K):
        inputs = start + tl.arange(0, K)[None, :]  # [1, K]
        is_input = inputs < INPUTS
        row_tile = tl.load(x_rows + inputs, mask=present[:, None] & is_input, other=0.0)  # [M, K]
        a_tile = tl.load(a_rows + inputs, mask=is_rank[:, None] & is_input, other=0.0)  # [N, K]
        total = tl.dot(row_tile, tl.trans(a_tile), total, input_precision="ieee")
    written = partials + (place.to(tl.int64) * SPLITS + split)[:, None] * (PARTS * RANK) + column[None, :]
    tl.store(written, total, mask=present[:, None] & is_rank[None, :])


@triton.jit
def expand_kernel(
    y,  # [T, OFFSETS[PARTS]] contiguous, mutated
    partials,  # see `shrink_kernel`
    b,  # [SLOTS, OFFSETS[PARTS], RANK] contiguous
    ranks,  # [SLOTS, PARTS]
    rows,  # [T], sorted by slot
    starts,  # [SLOTS + 1] where those of each slot begin
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    OFFSETS: tl.constexpr,  # where each part of the outputs begins, and their number
    TILES: tl.constexpr,  # of all parts
    SPLITS: tl.constexpr,
    E: tl.constexpr,  # the power of two not below SLOTS
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """M rows of one slot, and N outputs of one part."""
    outputs: tl.constexpr = OFFSETS[PARTS]
    slot, first, end = find_pairs(starts, tl.program_id(0) // TILES, E, SLOTS, M)
    if slot >= SLOTS:
        return
    tile = tl.program_id(0) % TILES
    part, begin, limit, before = 0, 0, 0, 0
    for index in tl.static_range(PARTS):
        if tile >= before:
            part, begin, limit = index, OFFSETS[index] + (tile - before) * N, OFFSETS[index + 1]
        before += (OFFSETS[index + 1] - OFFSETS[index] + N - 1) // N
    ranks_of_part = tl.load(ranks + slot * PARTS + part)
    if ranks_of_part == 0:
        return
    output = begin + tl.arange(0, N)  # [N]
    is_output = output < limit
    place = first + tl.arange(0, M)  # [M]
    present = place < end
    b_rows = b + (slot.to(tl.int64) * outputs + output)[:, None] * RANK
    sums = partials + place.to(tl.int64)[:, None] * (SPLITS * PARTS * RANK) + part * RANK
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, ranks_of_part, K):
        rank = start + tl.arange(0, K)[None, :]  # [1, K]
        is_rank = rank < ranks_of_part
        inner = tl.zeros([M, K], tl.float32)
        for split in tl.static_range(SPLITS):
            inner += tl.load(sums + split * PARTS * RANK + rank, mask=present[:, None] & is_rank, other=0.0)
        b_tile = tl.load(b_rows + rank, mask=is_output[:, None] & is_rank, other=0.0)  # [N, K]
        total = tl.dot(inner.to(b_tile.dtype), tl.trans(b_tile), total, input_precision="ieee")
    row = tl.load(rows + place, mask=present, other=0).to(tl.int64)
    added_to = y + row[:, None] * outputs + output[None, :]
    mask = present[:, None] & is_output[None, :]
    total += tl.load(added_to, mask=mask, other=0.0).to(tl.float32)
    tl.store(added_to, total.to(y.dtype.element_ty), mask=mask)


def _rank_tile(rank: int, most: int) -> int:
    """The least size of a matrix product, which is 16, that holds the rank; at most `most`."""
    return next(size for size in (16, 32, 64) if size >= min(rank, most))


@cache
def _shrink(dtype: torch.dtype, slots: int, parts: int, rank: int, inputs: int) -> Variant:
    # float32 is computed without tensor cores, which do not have its precision.
    step = 32 if dtype is torch.float32 else 128
    splits = min(MAX_SPLITS, triton.cdiv(inputs, SPLIT_INPUTS))
    constexprs = {
        "SLOTS": slots,
        "PARTS": parts,
        "RANK": rank,
        "INPUTS": inputs,
        "SPLITS": splits,
        "LENGTH": triton.cdiv(triton.cdiv(inputs, splits), step) * step,
        "E": triton.next_power_of_2(slots),
        "M": M,
        "N": _rank_tile(rank, 64),
        "K": step,
    }
    return Variant(shrink_kernel, constexprs, num_warps=4, num_stages=4)


@cache
def _expand(slots: int, rank: int, splits: int, offsets: tuple[int, ...]) -> Variant:
    constexprs = {
        "SLOTS": slots,
        "PARTS": len(offsets) - 1,
        "RANK": rank,
        "OFFSETS": offsets,
        "TILES": sum(triton.cdiv(end - begin, OUTPUTS) for begin, end in pairwise(offsets)),
        "SPLITS": splits,
        "E": triton.next_power_of_2(slots),
        "M": M,
        "N": OUTPUTS,
        "K": _rank_tile(rank, 32),  # with 64, more than 190 registers are used
    }
    return Variant(expand_kernel, constexprs, num_warps=4, num_stages=1)


def add_lora(y: torch.Tensor, x: torch.Tensor, table: StackedLora, rows: SortedRows) -> None:
    """Add to each row what its adapter makes of its inputs. Checks nothing; mutates `y`.

    x A^T is rounded to the dtype, and so is the sum with y. Rows without an adapter, and parts that an
    adapter lacks, are left alone.

    Args:
        y: [T, O] contiguous, the projection of x; float32, bfloat16 or float16.
        x: [T, I] of the same dtype.
        table: The adapters, of the same dtype.
        rows: The T rows, from `kernels.lora.row_slots`.
    """
    if not len(x):
        return
    slots, parts, rank, inputs = table.a.shape
    shrink = _shrink(x.dtype, slots, parts, rank, inputs)
    splits = shrink.constexprs["SPLITS"]
    expand = _expand(slots, rank, splits, table.offsets)
    # The most blocks of any distribution: one for each slot with a row, and one for each further M rows.
    begun = min(slots, len(x))
    blocks = begun + (len(x) - begun) // M
    tiles = parts * triton.cdiv(rank, shrink.constexprs["N"])
    partials = torch.empty(len(x), splits, parts, rank, dtype=torch.float32, device=x.device)
    order = (table.ranks, rows.rows, rows.starts)
    shrink.launch((blocks * tiles * splits,), partials, x.contiguous(), table.a, *order)
    expand.launch((blocks * expand.constexprs["TILES"],), y, partials, table.b, *order)
