"""A projection of a model: one matrix, which may hold several projections of a checkpoint, fused by rows.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.grouped_weight import AnyGroupedWeight
from kernels.linear import DenseWeight, linear
from kernels.lora import RowSlots, Table, add_lora, new_table, slot_bytes
from kernels.weight import Weight
from workers.models.parts import Part
from workers.models.shard import Slice


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The destination of a tensor of a checkpoint.

    Attributes:
        into: The weight or vector that it is a part of.
        shape: The shape of the tensor in the checkpoint.
        offset: Added to the checkpoint's values.
        taken: The part of the checkpoint's tensor; for a vector, its rows. None: a vector that is broadcast,
            such as the norm of a head.
        first: Its first row in `into`.
    """

    into: Weight
    shape: tuple[int, ...]
    offset: float = 0.0
    taken: Slice | None = None
    first: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        """A view into a parameter. Raises TypeError if it is not plain."""
        return self.into.plain[self.first : self.first + self._num_rows]

    @property
    def is_plain(self) -> bool:
        """Whether `tensor` is available: the parameter is a plain matrix or vector."""
        return isinstance(self.into, DenseWeight)

    @property
    def nbytes(self) -> int:
        return self.into.nbytes * self._num_rows // max(1, len(self.into))

    @property
    def _num_rows(self) -> int:
        return len(self.into) if self.taken is None else self.taken.num_rows

    def fill(self, part: torch.Tensor, first: int = 0) -> list[torch.Tensor]:
        """Write a checkpoint's tensor, or its rows from `first` on. Returns the results of `Weight.write`.

        To a GPU, from pinned memory, the copies are only queued.
        """
        if self.taken is None:
            written = [self.into.plain.copy_(part, non_blocking=True)]
        else:
            written = [*self._fill_taken(part, first, self.taken)]
        return [each.add_(self.offset) for each in written] if self.offset else written

    def fill_quantised(self, part: Part, first: int = 0) -> list[torch.Tensor]:
        """As `fill`, with quantised rows; of a GGUF file as bytes, see `AnyGroupedWeight.write_blocks`.

        Rows are whole: the weight takes the inputs that it has. Raises TypeError if it cannot hold them.
        """
        return [
            self._write_quantised(at, part[rows.start : rows.stop])
            for at, rows in self._rows(first, len(part))
        ]

    def _write_quantised(self, first: int, rows: Part) -> torch.Tensor:
        if not isinstance(rows, torch.Tensor):
            return rows.write(self.into, first)
        if not isinstance(self.into, AnyGroupedWeight):
            raise TypeError(f"a {type(self.into).__name__} takes no quantised rows")
        return self.into.write_blocks(first, rows)

    def _fill_taken(self, part: torch.Tensor, first: int, taken: Slice) -> Iterator[torch.Tensor]:
        for into, rows in self._rows(first, len(part)):
            source = part[rows.start : rows.stop]
            # Quantised weights take whole rows, because inputs of several ranks may share a scale.
            if part.dim() > 1 and not isinstance(self.into, AnyGroupedWeight):
                source = source[:, taken.columns.start : taken.columns.stop]
            yield self.into.write(into, source)

    def _rows(self, first: int, count: int) -> Iterator[tuple[int, range]]:
        """The taken ones of `count` rows from `first` on: (first row in `into`, range within the `count`)."""
        assert self.taken is not None
        into = self.first  # of the next range
        for rows in self.taken.rows:
            begin, end = max(rows.start, first), min(rows.stop, first + count)
            if begin < end:
                yield into + begin - rows.start, range(begin - first, end - first)
            into += len(rows)


class Linear:
    """x W^T + b. The rows of W are the projections of a checkpoint, one after the other.

    Attributes:
        taken: The part of each projection that this rank has, by its name in a checkpoint.
        parts: The number of outputs of each projection, by the same name.
        weight: [O, I].
        bias: [O], or None.
        inputs: The inputs in the model's own checkpoint that the weight has, in the weight's order. Adapters
            are for that checkpoint. Empty: the same inputs.
        parameter: The library's parameter that PEFT adapts instead of the module; None: it adapts the module.
        lora: The slots of adapters; None: it takes none.
        factors: Consecutive (number of outputs, factor), applied after adapters; empty: none.
    """

    def __init__(
        self,
        taken: Mapping[str, Slice],
        weight: Weight,
        bias: torch.Tensor | None,
        *,
        stored: Mapping[str, Slice] | None = None,
        inputs: tuple[range, ...] = (),
        factors: tuple[tuple[int, float], ...] = (),
        parameter: str | None = None,
    ) -> None:
        """Take ownership of parameters, which are uninitialised until the targets are filled.

        `stored`: the same rows as `taken`, in the order and under the names of the files. None: the files are
        the model's own checkpoint.
        """
        self.taken, self.inputs, self.factors, self.parameter = taken, inputs, factors, parameter
        self._stored = taken if stored is None else stored
        self.parts = {name: part.num_rows for name, part in taken.items()}
        self.weight = weight
        self.bias = bias
        self.lora: Table | None = None

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by its name, which begins with `prefix`."""
        bias = None if self.bias is None else DenseWeight(self.bias)
        first = 0
        for name, taken in self._stored.items():
            weight, at = self.weight.part(first)
            yield f"{prefix}{name}.weight", LoadTarget(weight, taken.shape, taken=taken, first=at)
            if bias is not None:
                yield f"{prefix}{name}.bias", LoadTarget(bias, taken.shape[:1], taken=taken, first=first)
            first += taken.num_rows

    def origins(self) -> Iterator[tuple[str, str, list[int]]]:
        """If files have other projections, for each: its name, the one that it is from, and which rows."""
        if self._stored is self.taken:
            return
        own = [(name, row) for name, part in self.taken.items() for rows in part.rows for row in rows]
        first = 0
        for name, part in self._stored.items():
            placed = zip(itertools.chain(*part.rows), own[first : first + part.num_rows], strict=True)
            names, rows = zip(*(one for _, one in sorted(placed)), strict=True)
            yield name, names[0], [*rows]
            first += part.num_rows

    def modules(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The numbers of outputs and inputs of each projection in the checkpoint, by its name."""
        for name, taken in self.taken.items():
            yield name, taken.shape

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """[O] float32, the factor of each output. None: there are none."""
        if not self.factors:
            return None
        counts, values = zip(*self.factors, strict=True)
        return torch.tensor(values).repeat_interleave(torch.tensor(counts)).to(self.weight.device)

    def pack(self) -> None:
        """Pack the filled weight in place. The targets must not be used afterwards."""
        self.weight = self.weight.packed()

    def lora_slot_bytes(self, max_rank: int) -> int:
        """The memory of a slot on a GPU in bytes, for this rank's part of the projection."""
        return slot_bytes(max_rank, self.weight.shape[1], [*self.parts.values()], self.weight.dtype)

    def allocate_lora(self, slots: int, max_rank: int) -> None:
        """Allocate empty slots for adapters. With 0 slots, free the memory."""
        if not slots:
            self.lora = None
            return
        weight, outputs = self.weight, [*self.parts.values()]
        self.lora = new_table(slots, max_rank, weight.shape[1], outputs, weight.dtype, weight.device)

    def __call__(
        self, x: torch.Tensor, lora_slots: RowSlots | None = None, *, batch_invariant: bool
    ) -> torch.Tensor:
        """[T, I] -> [T, O], a new tensor, including the adapter of each row, if any."""
        y = linear(x, self.weight, self.bias, batch_invariant=batch_invariant)
        if lora_slots is not None and self.lora is not None:
            add_lora(y, x, self.lora, lora_slots)
        return y if self.scales is None else (y.float() * self.scales).to(y.dtype)
