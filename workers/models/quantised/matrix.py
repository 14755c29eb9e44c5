"""A matrix that is stored in several quantised tensors, and parts of it in the form of weights in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.float8_weight import Float8Weight
from kernels.gpu_weight import GpuWeight
from kernels.group_formats import TABLES, GroupFormat, integer_groups
from kernels.grouped_weight import AnyGroupedWeight
from kernels.permuted_weight import PermutedWeight
from kernels.weight import Weight
from kernels.weight_formats import WeightFormat
from workers.common.quantised.scheme import Scheme
from workers.models.checkpoint import PART_BYTES, Staging, StoredTensor, TensorEntry
from workers.models.errors import UnsupportedError
from workers.models.parts import Part, QuantisedRows


@dataclass(frozen=True, slots=True)
class IntegerRows(QuantisedRows):
    """Rows of a matrix quantised to integers.

    Attributes:
        values: [n, I] int8; or uint8 with zero points, minima or a table. In the order of the groups.
        scales: [n, S].
        zeros: [n, S] zero points in the dtype of the values; None: they are 0.
        order: [I] int64, the input of each column; None: the columns are in order.
        table: The index in `TABLES` of the values' table; 0: values are numbers.
        minima: [n, S], added after scaling; None: they are 0.
    """

    zeros: torch.Tensor | None
    order: torch.Tensor | None
    table: int = 0
    minima: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> IntegerRows:
        zeros, minima = (None if each is None else each[rows] for each in (self.zeros, self.minima))
        return IntegerRows(self.values[rows], self.scales[rows], zeros, self.order, self.table, minima)

    def dense(self, group: int) -> torch.Tensor:
        """[n, I] float32, the dequantised rows, with inputs in order. `group`: the inputs of a group."""
        moved = torch.tensor(TABLES[self.table])[self.values.int()] if self.table else self.values
        moved = moved.float()
        if self.zeros is not None:
            moved -= _spread(self.zeros.float(), group, moved)
        found = _spread(self.scales.float(), group, moved) * moved
        if self.minima is not None:
            found += _spread(self.minima.float(), group, moved)
        return found if self.order is None else found[:, self.order.argsort()]

    def write(self, weight: Weight, first: int) -> torch.Tensor:
        if isinstance(weight, PermutedWeight):
            if first == 0 and self.order is not None:
                weight.reorder(self.order)
            weight = weight.within
        assert isinstance(weight, AnyGroupedWeight)
        weight.write_groups(first, self.values, self.scales, self.zeros, self.minima)
        return self.scales


@dataclass(frozen=True, slots=True)
class Float8Rows(QuantisedRows):
    """Rows of a matrix of 8-bit floats.

    Attributes:
        values: [n, I] float8_e4m3fn.
        scales: [n, S] float32.
    """

    def __getitem__(self, rows: slice) -> Float8Rows:
        return Float8Rows(self.values[rows], self.scales[rows])

    def dense(self, group: int) -> torch.Tensor:
        values = self.values.float()
        return _spread(self.scales, group, values) * values

    def write(self, weight: Weight, first: int) -> torch.Tensor:
        assert isinstance(weight, Float8Weight | GpuWeight)
        return weight.write_values(first, self.values, self.scales)


def _spread(of_groups: torch.Tensor, group: int, values: torch.Tensor) -> torch.Tensor:
    """[n, S] -> [n, I], the shape of the values."""
    return of_groups.repeat_interleave(group, dim=1)[:, : values.shape[1]]


class QuantisedMatrix(StoredTensor):
    """A matrix [O, I] that is stored in several quantised tensors.

    Attributes:
        entries: The tensors that it is stored in.
    """

    _form: WeightFormat

    def __init__(self, name: str, entries: Sequence[TensorEntry], shape: tuple[int, int]) -> None:
        self.name, self.shape, self.entries = name, shape, entries
        first = min(entries, key=lambda entry: (entry.file.name, entry.begin))
        self.file, self.begin = first.file, first.begin
        # The size of the values in parts.
        self.nbytes = shape[0] * shape[1]

    @property
    def form(self) -> WeightFormat:
        return self._form

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The name of the format."""
        return self._form.name

    def samples(self) -> Iterator[bytes]:
        for entry in self.entries:
            yield f"{entry.name.rpartition('.')[2]} {entry.dtype} {entry.shape}\n".encode()
            yield from entry.samples()

    def parts(self, rows: range | None = None, staging: Staging | None = None) -> Iterator[tuple[int, Part]]:
        """See `StoredTensor`. Parts are `IntegerRows` or `Float8Rows`."""
        assert staging is None, "parts are transcoded before they are copied"
        wanted = range(self.shape[0]) if rows is None else rows
        step = max(1, PART_BYTES // self.shape[1])
        yield from self._parts([range(at, min(at + step, wanted.stop)) for at in wanted[::step]])

    @abstractmethod
    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows | Float8Rows]]:
        """The rows of each range. Raises ModelError."""


def integer_format(scheme: Scheme, name: str, inputs: int, scales: torch.dtype) -> GroupFormat:
    """The format in which integers are held in memory. Raises UnsupportedError if there is none."""
    group = 0 if scheme.group >= inputs else scheme.group
    try:
        return integer_groups(scheme.bits, group, scales, zeros=scheme.has_zeros, minima=scheme.has_minima)
    except ValueError as error:
        raise UnsupportedError(f"tensor {name}: {error}") from None
