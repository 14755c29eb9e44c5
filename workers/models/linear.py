"""A projection of a model: one matrix, which may hold several projections of a checkpoint, fused by rows.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kernels.linear import DenseWeight, linear
from kernels.lora import RowSlots, Table, add_lora, new_table, slot_bytes
from kernels.weight import Weight
from workers.models.shard import Slice

Allocate = Callable[..., torch.Tensor]
"""Allocates a tensor of the given sizes, in the model's dtype and on its device."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The destination of a tensor of a checkpoint.

    Attributes:
        tensor: A view into a parameter.
        shape: The shape of the tensor in the checkpoint.
        offset: Added to the checkpoint's values.
        taken: The part of the checkpoint's tensor. Of a vector, the rows are taken. None: it is a vector that
            is broadcast, such as the norm of a head.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: float = 0.0
    taken: Slice | None = None

    def fill(self, part: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Write a checkpoint's tensor, or its rows from `first` on. Returns the view that was written to.

        To a GPU, from pinned memory, the copies are only queued.
        """
        filled = (
            self.tensor.copy_(part, non_blocking=True)
            if self.taken is None
            else self._fill_taken(part, first, self.taken)
        )
        return filled.add_(self.offset) if self.offset else filled

    def _fill_taken(self, part: torch.Tensor, first: int, taken: Slice) -> torch.Tensor:
        written = []
        into = 0  # of the next range
        for rows in taken.rows:
            begin, end = max(rows.start, first), min(rows.stop, first + len(part))
            if begin < end:
                view = self.tensor[into + begin - rows.start : into + end - rows.start]
                source = part[begin - first : end - first]
                columns = source[:, taken.columns.start : taken.columns.stop] if part.dim() > 1 else source
                view.copy_(columns, non_blocking=True)
                written.append((into + begin - rows.start, into + end - rows.start))
            into += len(rows)
        # Next to each other, as the ranges are.
        return self.tensor[written[0][0] : written[-1][1]] if written else self.tensor[:0]


class Linear:
    """x W^T + b. The rows of W are the projections of a checkpoint, one after the other.

    Attributes:
        taken: The part of each projection that this rank has, by its name in a checkpoint.
        parts: The number of outputs of each, by the same name.
        weight: [O, I].
        bias: [O], or None.
        lora: What adapters add; None: the model takes none.
    """

    def __init__(self, empty: Allocate, inputs: int, taken: Mapping[str, Slice], *, bias: bool) -> None:
        """Allocate parameters for `inputs` columns. They are uninitialised until the targets are filled."""
        self.taken = taken
        self.parts = {name: part.num_rows for name, part in taken.items()}
        outputs = sum(self.parts.values())
        self.weight: Weight = DenseWeight(empty(outputs, inputs))
        self.bias = empty(outputs) if bias else None
        self.lora: Table | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by its name, which begins with `prefix`."""
        for kind, tensor in (("weight", self.weight.plain), ("bias", self.bias)):
            if tensor is not None:
                parts = torch.split(tensor, list(self.parts.values()))
                for (name, taken), part in zip(self.taken.items(), parts, strict=True):
                    yield f"{prefix}{name}.{kind}", LoadTarget(part, taken.shape[: part.dim()], taken=taken)

    def modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Outputs and inputs of each projection in the checkpoint, by its name."""
        for name, taken in self.taken.items():
            yield name, taken.shape

    def pack(self) -> None:
        """Pack the filled weight in place. The targets must not be used afterwards."""
        self.weight = self.weight.packed()

    def lora_slot_bytes(self, max_rank: int) -> int:
        """The memory of a slot on a GPU, for the part of the projection that this rank has."""
        return slot_bytes(max_rank, self.weight.shape[1], [*self.parts.values()], self.weight.dtype)

    def allocate_lora(self, slots: int, max_rank: int) -> None:
        """Make empty slots for adapters; without slots, give the memory back."""
        if not slots:
            self.lora = None
            return
        weight, outputs = self.weight, [*self.parts.values()]
        self.lora = new_table(slots, max_rank, weight.shape[1], outputs, weight.dtype, weight.device)

    def __call__(
        self, x: torch.Tensor, lora_slots: RowSlots | None = None, *, batch_invariant: bool
    ) -> torch.Tensor:
        """[T, I] -> [T, O], a new tensor; with the adapter of each row, if any has one."""
        y = linear(x, self.weight, self.bias, batch_invariant=batch_invariant)
        if lora_slots is not None:
            assert self.lora is not None, "the model takes adapters"
            add_lora(y, x, self.lora, lora_slots)
        return y
