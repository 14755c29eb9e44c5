"""GPTQ and AWQ: words of values along the inputs, or along the outputs, of the transposed matrix.

GPTQ has qweight int32 [I * bits / 32, O], qzeros int32 [G, O * bits / 32], scales [G, O] and g_idx int32 [I],
the group of each input. AWQ has qweight int32 [I, O / 8], qzeros int32 [G, O / 8] and scales [G, O], where
a word has the values of the outputs 0, 2, 4, 6, 1, 3, 5, 7. A weight is scale * (value - zero point).

Sources: `dequantize_weight` of GPTQModel's nn_modules/qlinear, `dequantize_gemm` of AutoAWQ's packing_utils.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.weight_formats import PermutedFormat
from workers.common.quantised.scheme import Scheme
from workers.models.checkpoint import TensorEntry
from workers.models.errors import ModelError
from workers.models.quantised.matrix import IntegerRows, QuantisedMatrix, integer_format
from workers.models.quantised.tensors import (
    SCALES,
    Tensors,
    input_order,
    read,
    read_scales,
    unpack_columns,
    unpack_rows,
)

_WORD = ("I32",)
# The place in a word of AWQ of each of its 8 outputs.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_LOW_WORD = 0xFFFFFFFF
# With this number of bits, values may begin in one word and end in the next.
_UNEVEN = 3


class GptqMatrix(QuantisedMatrix):
    """A matrix in the layout of GPTQ."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        """Check the headers. Raises ModelError."""
        self._scheme = scheme
        self._words = tensors.need_matrix("qweight", _WORD)
        rows, outputs = self._words.shape
        if scheme.bits == _UNEVEN and (rows % _UNEVEN or outputs % 32):
            says = f"{list(self._words.shape)}, which is not for multiples of 32 values of {_UNEVEN} bits"
            raise ModelError(f"{self._words.file}: tensor {self._words.name} has shape {says}")
        inputs = rows * 32 // scheme.bits
        groups = -(-inputs // (scheme.group or inputs))
        self._scales = tensors.need("scales", SCALES, (groups, outputs))
        self._zeros = tensors.need("qzeros", _WORD, (groups, -(-outputs * scheme.bits // 32)))
        self._groups: TensorEntry | None = None
        if scheme.has_order or "g_idx" in tensors.entries:
            self._groups = tensors.need("g_idx", _WORD, (inputs,))
        entries = [self._words, self._scales, self._zeros, *([self._groups] if self._groups else [])]
        super().__init__(f"{tensors.module}.qweight", entries, (outputs, inputs))
        within = integer_format(scheme, self.name, inputs, SCALES[self._scales.dtype])
        self._form = PermutedFormat(within) if scheme.has_order else within

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        scheme, (outputs, inputs) = self._scheme, self.shape
        words, scales = read(self._words), read_scales(self._scales).T.contiguous()
        stored = read(self._zeros)
        if scheme.has_zeros:
            stored = _moved(stored, scheme)
        zeros = unpack_columns(stored, scheme.bits)[:, :outputs].T.contiguous()
        order = None
        if self._groups is not None:
            order = input_order(self._groups, inputs, scheme.group or inputs)
            if order is not None and not scheme.has_order:
                raise ModelError(
                    f"{self.file}: tensor {self._groups.name} has an order, but desc_act is false"
                )
        middle = 1 << (scheme.bits - 1)
        if not scheme.has_zeros and not bool((zeros + scheme.zero_offset == middle).all()):
            raise ModelError(
                f"{self.file}: tensor {self._zeros.name} is not {middle} everywhere, but sym is true"
            )
        for rows in ranges:
            values = unpack_rows(words[:, rows.start : rows.stop], scheme.bits)  # [n, I]
            if order is not None:
                values = values.index_select(1, order)
            part = slice(rows.start, rows.stop)
            yield rows.start, integer_rows(values, scales[part], zeros[part], order, scheme)


class AwqMatrix(QuantisedMatrix):
    """A matrix in the layout of AWQ."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        """Check the headers. Raises ModelError."""
        self._scheme = scheme
        self._words = tensors.need_matrix("qweight", _WORD)
        inputs, columns = self._words.shape
        groups = -(-inputs // (scheme.group or inputs))
        self._scales = tensors.need("scales", SCALES, (groups, columns * 8))
        self._zeros = tensors.need("qzeros", _WORD, (groups, columns))
        super().__init__(
            f"{tensors.module}.qweight", [self._words, self._scales, self._zeros], (columns * 8, inputs)
        )
        self._form = integer_format(scheme, self.name, inputs, SCALES[self._scales.dtype])

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        words, scales = read(self._words), read_scales(self._scales).T.contiguous()
        zeros = _awq_values(read(self._zeros)).T.contiguous()
        for rows in ranges:
            first, last = rows.start // 8, -(-rows.stop // 8)
            values = _awq_values(words[:, first:last]).T[rows.start - first * 8 : rows.stop - first * 8]
            part = slice(rows.start, rows.stop)
            yield rows.start, integer_rows(values.contiguous(), scales[part], zeros[part], None, self._scheme)


def integer_rows(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    order: torch.Tensor | None,
    scheme: Scheme,
) -> IntegerRows:
    """Rows from unsigned values [n, I]. Without zero points in a symmetric scheme: all are in the middle."""
    if scheme.has_zeros:
        return IntegerRows(values, scales, zeros, order)
    signed = (values - (1 << (scheme.bits - 1))).view(torch.int8)
    return IntegerRows(signed, scales, None, order)


def _moved(zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Words of zero points with the offset added to each, with carries, as GPTQModel subtracts it."""
    offsets = sum(scheme.zero_offset << bit for bit in range(0, 32, scheme.bits))
    moved = (zeros.long() + offsets) & _LOW_WORD
    return torch.where(moved > _LOW_WORD >> 1, moved - _LOW_WORD - 1, moved).int()


def _awq_values(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, W] -> uint8 [n, W * 8]."""
    count, columns = words.shape
    return unpack_columns(words, 4).view(count, columns, 8)[:, :, _AWQ_PLACES].flatten(1)
