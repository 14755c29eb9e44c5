"""Low-rank adapters: y += (x A^T) B^T, with an adapter of its own for each row, or none.

An adapter may also scale each output of the sum, and shift it (DoRA): it is rounded once more then.

A projection may consist of several parts, one after the other in its outputs, each with an A and a B. The
matrices of an adapter are in a slot of the projection's table, and a forward has the slot of each row.

x A^T is rounded to the dtype, and so is the sum with y. The bits of a row do not depend on the other rows if
there is a compiled product for the dtype, and on a GPU.

Dimension letters: T rows; I inputs; O outputs of all parts; r rank; S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_same, check_tensor
from kernels.cpu import linear as cpu_linear
from kernels.cpu import lora as cpu
from kernels.lora_pairs import LoraPairs, SortedRows

if TYPE_CHECKING:
    from kernels.cuda.lora import StackedLora

MAX_PARTS = 6


class LoraTable:
    """The adapters of one projection, by slot.

    Attributes:
        inputs: I.
        outputs: The number of outputs of each part.
        slots: What is in each slot; None: nothing.
    """

    def __init__(
        self, slots: int, inputs: int, outputs: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make empty slots for a projection [sum of `outputs`, `inputs`]."""
        if not 1 <= len(outputs) <= MAX_PARTS:
            raise ValueError(f"outputs: must be of 1 to {MAX_PARTS} parts, got {len(outputs)}")
        self.inputs, self.outputs = inputs, tuple(outputs)
        self.slots: list[LoraPairs | None] = [None] * slots
        can_compile = device.type == "cpu" and cpu_linear.can_multiply(dtype)
        self.compiled = cpu.Table(slots, outputs) if can_compile else None

    @property
    def address(self) -> int | None:
        """The address of what compiled kernels read, which does not change. None: there are no kernels."""
        return None if self.compiled is None else self.compiled.address

    def set(self, slot: int, pairs: LoraPairs | None) -> None:
        """Replace what is in a slot; None: nothing is. Keeps `pairs` alive. Not while a forward runs."""
        self.slots[slot] = pairs
        if self.compiled is not None:
            self.compiled.set(slot, pairs)


# By the device.
Table: TypeAlias = "LoraTable | StackedLora"


def new_table(
    slots: int,
    max_rank: int,
    inputs: int,
    outputs: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Table:
    """Make a table of empty slots for a projection.

    On a GPU this allocates memory for slots of the largest rank; elsewhere, adapters bring theirs.

    Args:
        slots: S.
        max_rank: The largest rank of an adapter.
        inputs: I.
        outputs: The number of outputs of each part, of which there are up to MAX_PARTS.
        dtype: That of the projection.
        device: That of the projection.
    """
    if not _has_triton_kernels(device):
        return LoraTable(slots, inputs, outputs, dtype, device)
    from kernels.cuda.lora import StackedLora

    return StackedLora(slots, max_rank, inputs, outputs, dtype, device)


def slot_bytes(max_rank: int, inputs: int, outputs: Sequence[int], dtype: torch.dtype) -> int:
    """The memory of a slot of `new_table` on a GPU, whatever is in it: see there for the arguments."""
    rank = max_rank + max_rank % 2
    return dtype.itemsize * rank * (len(outputs) * inputs + sum(outputs))


RowSlots = torch.Tensor | SortedRows
"""The slots of the rows of a forward, in the form that the kernels of the device read."""


def row_slots(slots: torch.Tensor, count: int) -> RowSlots:
    """Prepare slots for `add_lora`, once for all projections with these rows. Reads nothing back from a GPU.

    Args:
        slots: [T] int32, the slot of each row; -1: it has no adapter.
        count: S.
    """
    if not _has_triton_kernels(slots.device):
        return slots
    ordered, rows = slots.sort(stable=True)
    numbers = torch.arange(count + 1, dtype=slots.dtype, device=slots.device)
    return SortedRows(rows, torch.searchsorted(ordered, numbers))


def _has_triton_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def lora_reference(y: torch.Tensor, x: torch.Tensor, table: LoraTable, slots: torch.Tensor) -> None:
    """The addition in torch, slot by slot; see `add_lora`. No matrix is packed."""
    outputs = [*pairwise(accumulate(table.outputs, initial=0))]
    for slot in sorted({*slots.tolist()}):
        pairs = table.slots[slot] if slot >= 0 else None
        if pairs is None:
            continue
        rows = (slots == slot).nonzero()[:, 0]  # [n]
        inner = functional.linear(x.index_select(0, rows), pairs.a.plain.to(x.device))  # [n, ranks of A]
        parts = zip(pairs.b, pairs.ranks, pairs.starts, outputs, strict=True)
        for b, rank, start, (begin, end) in parts:
            if b is None:
                continue
            of_part = inner[:, start : start + rank].float()
            added = functional.linear(of_part, b.plain.to(x.device).float())
            found = (y[rows, begin:end].float() + added).to(y.dtype)
            if pairs.scales is not None:
                shift = 0.0 if pairs.shifts is None else pairs.shifts[begin:end]
                found = (found.float() * pairs.scales[begin:end] + shift).to(y.dtype)
            y[rows, begin:end] = found


def add_lora(y: torch.Tensor, x: torch.Tensor, table: Table, slots: RowSlots) -> None:
    """Add to each row of a projection what its adapter makes of its inputs.

    Mutates `y`. Rows without an adapter, and parts that an adapter lacks, are left alone.

    Args:
        y: [T, O] contiguous, the projection of x; float32, bfloat16 or float16.
        x: [T, I] of the same dtype.
        table: The adapters, of the same dtype.
        slots: Of the T rows, from `row_slots`. A row of an empty slot has no adapter.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
        IndexError: There is no such slot (on the CPU).
    """
    check_tensor("x", x, (None, table.inputs), FLOAT_DTYPES)
    check_tensor("y", y, (len(x), sum(table.outputs)), FLOAT_DTYPES)
    check_same("y", y, "x", x)
    if not y.is_contiguous():
        raise ValueError(f"y: must be contiguous, got strides {y.stride()}")
    if isinstance(slots, SortedRows):
        from kernels.cuda import lora as cuda

        assert isinstance(table, cuda.StackedLora), "rows are prepared for another device"
        check_tensor("slots", slots.rows, (len(x),), (torch.int64,))
        cuda.add_lora(y, x, table, slots)
        return
    assert isinstance(table, LoraTable), "rows are prepared for another device"
    check_tensor("slots", slots, (len(x),), (torch.int32,))
    if table.compiled is not None:
        cpu.add_lora(y, x, table.compiled, slots)
    else:
        lora_reference(y, x, table, slots)
