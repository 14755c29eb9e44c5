"""Integers of compressed-tensors: rows of the matrix, in words or as bytes.

In words: weight_packed int32 [O, I * bits / 32] of values with half of their range added, weight_scale
[O, G], weight_shape [2], weight_zero_point int32 [O * bits / 32, G], packed as the values but along the
outputs, and weight_g_idx int32 [I]. As bytes: weight int8 [O, I], weight_scale, and weight_zero_point int8. A
weight is scale * (value - zero point).

Source: `compressors/pack_quantized` and `compressors/naive_quantized` of the compressed-tensors library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.weight_formats import PermutedFormat
from workers.common.quantised.scheme import Layout, Scheme
from workers.models.checkpoint import TensorEntry
from workers.models.errors import ModelError
from workers.models.quantised.matrix import IntegerRows, QuantisedMatrix, integer_format
from workers.models.quantised.tensors import (
    SCALES,
    Tensors,
    input_order,
    read,
    read_scales,
    spread,
    unpack_columns,
    unpack_rows,
)

_SHAPE = ("I64", "I32")


class CompressedMatrix(QuantisedMatrix):
    """A matrix in one of these layouts."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        """Check the headers, and read the shape. Raises ModelError."""
        self._scheme = scheme
        is_packed = scheme.layout is Layout.PACKED
        self._values = (
            tensors.need_matrix("weight_packed", ("I32",))
            if is_packed
            else tensors.need_matrix("weight", ("I8",))
        )
        outputs, inputs = self._values.shape
        shape: list[TensorEntry] = []
        if is_packed:
            shape = [tensors.need("weight_shape", _SHAPE, (2,))]
            inputs = self._inputs(shape[0])
        groups = -(-inputs // (scheme.group or inputs))
        scales = tensors.need("weight_scale", SCALES)
        _check_spreads(scales, outputs, groups)
        self._scales = scales
        self._zeros = self._zero_points(tensors, outputs, groups) if scheme.has_zeros else None
        self._groups = tensors.need("weight_g_idx", ("I32",), (inputs,)) if scheme.has_order else None
        others = [entry for entry in (self._zeros, self._groups) if entry is not None]
        name = self._values.name
        super().__init__(name, [self._values, self._scales, *shape, *others], (outputs, inputs))
        within = integer_format(scheme, self.name, inputs, SCALES[scales.dtype])
        self._form = PermutedFormat(within) if scheme.has_order else within

    def _inputs(self, shape: TensorEntry) -> int:
        """The number of inputs of a packed matrix, whose words may have room for more."""
        outputs, inputs = read(shape).tolist()
        each, words = 32 // self._scheme.bits, self._values.shape[1]
        if outputs != self._values.shape[0] or not (words - 1) * each < inputs <= words * each:
            stored = f"[{outputs}, {inputs}], which {self._values.name} does not have"
            raise ModelError(f"{shape.file}: tensor {shape.name} says {stored}")
        return int(inputs)

    def _zero_points(self, tensors: Tensors, outputs: int, groups: int) -> TensorEntry:
        entry = tensors.need("weight_zero_point", ("I32", "I8"))
        if entry.dtype == "I8":
            _check_spreads(entry, outputs, groups)
            return entry
        return tensors.need("weight_zero_point", ("I32",), (-(-outputs * self._scheme.bits // 32), groups))

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        scheme, (outputs, inputs) = self._scheme, self.shape
        scales = spread(read_scales(self._scales), outputs)
        zeros = None if self._zeros is None else self._read_zeros(self._zeros)
        order = None
        if self._groups is not None:
            order = input_order(self._groups, inputs, scheme.group or inputs)
        for rows in ranges:
            values = read(self._values, rows)
            if scheme.layout is Layout.PACKED:
                values = _signed(unpack_columns(values, scheme.bits)[:, :inputs], scheme.bits)
            self._check_range(values, self._values)
            if order is not None:
                values = values.index_select(1, order)
            part = slice(rows.start, rows.stop)
            yield rows.start, IntegerRows(values, scales[part], None if zeros is None else zeros[part], order)

    def _read_zeros(self, entry: TensorEntry) -> torch.Tensor:
        """[O, G] int8."""
        zeros = read(entry)
        if entry.dtype == "I32":
            zeros = _signed(unpack_rows(zeros, self._scheme.bits).T[: self.shape[0]], self._scheme.bits)
        self._check_range(zeros, entry)
        return spread(zeros, self.shape[0])

    def _check_range(self, values: torch.Tensor, entry: TensorEntry) -> None:
        """Raises ModelError for bytes that are not valid 4-bit values."""
        if self._scheme.bits == 4 and (int(values.min()) < -8 or int(values.max()) > 7):
            raise ModelError(f"{entry.file}: tensor {entry.name} has values that are not of 4 bits")


def _signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values - (1 << (bits - 1))).view(torch.int8)


def _check_spreads(entry: TensorEntry, outputs: int, groups: int) -> None:
    """Raises ModelError unless there is one for the matrix, for each row, or for each group."""
    allowed: list[tuple[int, ...]] = [(outputs, groups)]
    if groups == 1:
        allowed += [(outputs,), (1,), (1, 1), ()]
    if entry.shape not in allowed:
        shapes = f"shape {list(entry.shape)}, but must have {[outputs, groups]}"
        raise ModelError(f"{entry.file}: tensor {entry.name} has {shapes}")
