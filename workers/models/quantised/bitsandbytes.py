"""bitsandbytes: matrices of 4 bits as one vector of bytes, and of 8 bits as rows.

4 bits: weight uint8 [O * I / 2, 1], the first value of a byte in its upper half; weight.absmax, a float32 for
each block of inputs; weight.quant_map [16], the factors that values stand for; and the shape and the size
of blocks as JSON in weight.quant_state.bitsandbytes__nf4 or __fp4. With "double quantisation" absmax is
uint8: weight.nested_quant_map [256] at it, times weight.nested_absmax of its block, plus an offset. Of 8
bits: weight int8 [O, I] and SCB float32 [O], 127 times the scale of a row.

Source: `QuantState` and `dequantize_4bit` in functional.py of bitsandbytes, `Linear8bitLt` in nn/modules.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from kernels.group_formats import GROUP_INPUTS, TABLES, integer_groups, table_groups
from workers.common.quantised.scheme import Layout, Quantisation, Scheme, shown
from workers.models.checkpoint import StoredTensor, TensorEntry
from workers.models.errors import ModelError
from workers.models.files import parse_object
from workers.models.quantised.matrix import IntegerRows, QuantisedMatrix
from workers.models.quantised.tensors import SCALES, Tensors, checked_scales, read, read_scales

_WEIGHT, _STATE = ".weight", "weight.quant_state.bitsandbytes__"
_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
_ROW_SCALES, _ORDER = "SCB", "weight_format"
_PARTS_OF_4 = (_ABSMAX, _MAP, _NESTED, _NESTED_MAP, f"{_STATE}nf4", f"{_STATE}fp4")
_MAX_STATE_BYTES = 4096
_BLOCKS = tuple(1 << power for power in range(5, 13))
_MAX_DIMENSION = 1 << 24
_LEVELS, _NESTED_LEVELS = 16, 256
# More than the largest float32. Larger integers could not be converted to a float.
_MAX_OFFSET = 1e39
# Versions have computed the table in different ways, all in float32.
_TABLE_TOLERANCE = 1e-6


def bitsandbytes_tensors(entries: Mapping[str, TensorEntry], said: Quantisation) -> dict[str, StoredTensor]:
    """The tensors of a model, by the names that they have in unquantised checkpoints. Raises ModelError."""
    scheme = said.rules[0][1]
    matrix, mark, parts = (
        (TableMatrix, _ABSMAX, _PARTS_OF_4)
        if scheme.layout is Layout.TABLE
        else (ByteRowsMatrix, _ROW_SCALES, (_ROW_SCALES, _ORDER))
    )
    found: dict[str, StoredTensor] = {}
    left = dict(entries)
    for name in entries:
        module = name.removesuffix(_WEIGHT)
        if module != name and f"{module}.{mark}" in entries:
            own = {
                part: left.pop(f"{module}.{part}")
                for part in ("weight", *parts)
                if f"{module}.{part}" in left
            }
            found[name] = matrix(Tensors(module, own), scheme)
    return found | left


class TableMatrix(QuantisedMatrix):
    """A matrix of 4 bits."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:  # noqa: ARG002 - as other layouts
        """Check the headers, and read the shape. Raises ModelError."""
        states = [part for part in tensors.entries if part.startswith(_STATE)]
        state = tensors.need(states[0] if len(states) == 1 else f"{_STATE}nf4", ("U8",))
        kind = (states or [_STATE])[0].removeprefix(_STATE)
        self._said = _read_state(state, kind)
        outputs, inputs = self._said.shape
        values = tensors.need("weight", ("U8", *SCALES))
        if 2 * values.nbytes != outputs * inputs:
            stored = f"[{outputs}, {inputs}], which {values.name} does not have"
            raise ModelError(f"{state.file}: tensor {state.name} says {stored}")
        # Some files store the bytes as another dtype, for tools that only support that.
        self._values = dataclasses.replace(values, dtype="U8", shape=(outputs, inputs // 2))
        count = -(-outputs * inputs // self._said.block)
        is_nested = tensors.entries[_ABSMAX].dtype == "U8"
        self._scales = tensors.need(_ABSMAX, ("U8", "F32"), (count,))
        self._nested: tuple[TensorEntry, TensorEntry] | None = None
        if is_nested:
            blocks = -(-count // self._said.nested_block)
            self._nested = (
                tensors.need(_NESTED, ("F32",), (blocks,)),
                tensors.need(_NESTED_MAP, ("F32",), (_NESTED_LEVELS,)),
            )
        self._table = tensors.need(_MAP, ("F32",), (_LEVELS,))
        super().__init__(values.name, [*tensors.entries.values()], (outputs, inputs))
        # A block may end within a row, and go on in the next one.
        self._group = math.gcd(self._said.block, inputs)
        form = table_groups(kind, 0 if self._group == inputs else self._group)
        self._form, self._places = form, form.table
        _check_table(self._table, form.table)

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        table = self._places
        groups = torch.arange(0, math.prod(self.shape), self._group) // self._said.block
        scales = (self._absmax() / max(TABLES[table]))[groups].view(self.shape[0], -1)
        for rows in ranges:
            raw = read(self._values, rows)
            values = torch.stack([raw >> 4, raw & 15], dim=2).flatten(1)
            yield rows.start, IntegerRows(values, scales[rows.start : rows.stop], None, None, table)

    def _absmax(self) -> torch.Tensor:
        """[blocks] float32. Raises ModelError if one is not finite."""
        if self._nested is None:
            return read_scales(self._scales)
        outer, levels = map(read_scales, self._nested)
        found = levels[read(self._scales).int()]
        found *= outer.repeat_interleave(self._said.nested_block)[: len(found)]
        found += self._said.offset
        return checked_scales(self._scales, found)


class ByteRowsMatrix(QuantisedMatrix):
    """A matrix of 8 bits."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:  # noqa: ARG002 - as other layouts
        """Check the headers. Raises ModelError."""
        self._values = tensors.need_matrix("weight", ("I8",))
        self._scales = tensors.need(_ROW_SCALES, ("F32",), self._values.shape[:1])
        if _ORDER in tensors.entries:
            order = tensors.need(_ORDER, ("U8",), ())
            if int(read(order)) != 0:
                raise ModelError(f"{order.file}: tensor {order.name} must be 0, which is an order of rows")
        outputs, inputs = self._values.shape
        super().__init__(self._values.name, [*tensors.entries.values()], (outputs, inputs))
        self._form = integer_groups(8, 0, torch.float32, zeros=False)

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, IntegerRows]]:
        scales = read_scales(self._scales)[:, None] / 127
        for rows in ranges:
            part = scales[rows.start : rows.stop]
            yield rows.start, IntegerRows(read(self._values, rows), part, None, None)


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """The description that is stored with a matrix of 4 bits.

    Attributes:
        shape: [O, I].
        block: The number of inputs with one absmax.
        nested_block: The number of absmax with one value of `nested_absmax`.
        offset: Added to nested absmax.
    """

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


def _read_state(entry: TensorEntry, kind: str) -> _State:
    """Raises ModelError."""
    if entry.nbytes > _MAX_STATE_BYTES:
        raise ModelError(f"{entry.file}: tensor {entry.name} has more than {_MAX_STATE_BYTES} bytes")
    where = f"tensor {entry.name} "
    said = parse_object(bytes(read(entry).numpy()), entry.file, where)
    shape, block, nested = (said.get(name) for name in ("shape", "blocksize", "nested_blocksize"))
    offset = said.get("nested_offset", 0.0)
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < _MAX_DIMENSION for size in sizes):
        raise _wrong(entry.file, where, "shape: must be two positive integers", shape)
    if type(block) is not int or block not in _BLOCKS:
        raise _wrong(entry.file, where, f"blocksize: must be one of {', '.join(map(str, _BLOCKS))}", block)
    if sizes[1] % GROUP_INPUTS:
        raise _wrong(entry.file, where, f"shape: a row must have a multiple of {GROUP_INPUTS}", sizes[1])
    if nested is not None and (type(nested) is not int or not 0 < nested < _MAX_DIMENSION):
        raise _wrong(entry.file, where, "nested_blocksize: must be a positive integer", nested)
    if not isinstance(offset, int | float) or abs(offset) > _MAX_OFFSET:
        raise _wrong(entry.file, where, "nested_offset: must be a number", offset)
    if said.get("quant_type") != kind:
        raise _wrong(entry.file, where, f"quant_type: must be {kind}", said.get("quant_type"))
    return _State((sizes[0], sizes[1]), block, nested or _NESTED_LEVELS, float(offset))


def _wrong(file: Path, where: str, must: str, got: object) -> ModelError:
    return ModelError(f"{file}: {where}says {must}, got {shown(got)}")


def _check_table(entry: TensorEntry, table: int) -> None:
    """Raises ModelError unless a table is the known one of bitsandbytes."""
    numbers = torch.tensor(TABLES[table], dtype=torch.float32)
    off = (read(entry) - numbers / numbers.max()).abs()
    # `TABLES` has them rounded to integers.
    if not bool((off <= 0.5 / numbers.max() + _TABLE_TOLERANCE).all()):
        raise ModelError(f"{entry.file}: tensor {entry.name} is another table than that of bitsandbytes")
