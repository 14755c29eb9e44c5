"""The tensors of a quantised matrix: checks of their headers, and readers of their contents."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from workers.models.checkpoint import TensorEntry
from workers.models.errors import ModelError

# Names in a safetensors header.
# U32: words of packed bits, for which the sign does not matter.
INTEGERS = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "U32": torch.int32, "I64": torch.int64,
}  # fmt: skip
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}
# Scales that are only the exponent of a power of two.
EXPONENTS = {"F8_E8M0": torch.float8_e8m0fnu}
_DTYPES = INTEGERS | SCALES | FLOAT8 | EXPONENTS
# The largest number that a scale is multiplied by.
_MOST_VALUE = 512.0


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a module, such as model.layers.0.mlp.up_proj.

    Attributes:
        module: Its name in the files.
        entries: The tensors, by the last part of their names.
    """

    module: str
    entries: Mapping[str, TensorEntry]

    def need(self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> TensorEntry:
        """Returns a tensor after checking its header. Raises ModelError."""
        entry = self.entries.get(name)
        if entry is None:
            any_file = next(iter(self.entries.values())).file
            raise ModelError(f"{any_file}: tensor {self.module}.{name} is missing")
        if entry.dtype not in dtypes:
            known = " or ".join(dtypes)
            raise ModelError(f"{entry.file}: tensor {entry.name} must be {known}, got {entry.dtype}")
        if shape is not None and entry.shape != shape:
            shapes = f"shape {list(entry.shape)}, but must have {list(shape)}"
            raise ModelError(f"{entry.file}: tensor {entry.name} has {shapes}")
        if entry.nbytes != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
            size = f"{entry.dtype} {list(entry.shape)} but has {entry.nbytes} bytes"
            raise ModelError(f"{entry.file}: tensor {entry.name} is {size}")
        return entry

    def need_matrix(self, name: str, dtypes: Collection[str]) -> TensorEntry:
        """Returns a tensor of two nonzero dimensions. Raises ModelError."""
        entry = self.need(name, dtypes)
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise ModelError(f"{entry.file}: tensor {entry.name} must be a matrix, got {list(entry.shape)}")
        return entry


def read(entry: TensorEntry, rows: range | None = None) -> torch.Tensor:
    """Reads a tensor, or some of its rows. Its header must have been checked. Raises ModelError."""
    count = (entry.shape[0] if entry.shape else 1) if rows is None else len(rows)
    row_bytes = entry.nbytes // max(1, entry.shape[0] if entry.shape else 1)
    content = torch.empty(count, row_bytes, dtype=torch.uint8)
    begin = 0 if rows is None else rows.start
    for first, part in entry.parts(rows):
        into = content[first - begin : first - begin + (len(part) if part.dim() else 1)]
        into.copy_(part.reshape(len(into), -1).view(torch.uint8))
    shape = (count, *entry.shape[1:]) if entry.shape else ()
    return content.view(-1).view(_DTYPES[entry.dtype]).view(shape)


def read_scales(entry: TensorEntry) -> torch.Tensor:
    """Reads scales. Raises ModelError unless all their products with values are finite."""
    scales = read(entry)
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.float()
    return checked_scales(entry, scales)


def checked_scales(entry: TensorEntry, scales: torch.Tensor) -> torch.Tensor:
    """Checks scales that were derived from a tensor, as `read_scales`. Raises ModelError."""
    if not (scales.float() * _MOST_VALUE).isfinite().all():
        raise ModelError(f"{entry.file}: tensor {entry.name} is not finite, or too large")
    return scales


def spread(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    """Expands scales or zero points of a matrix or its rows: [], [1], [O], [O, S] -> [O, S]."""
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    return scales.expand(outputs, scales.shape[1])


def unpack_columns(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks values along rows of words, the lowest bits first: int32 [n, W] -> uint8 [n, W * 32 / bits].

    A value may begin in one word and end in the next.
    """
    # Flattened, since a dimension of size 1 may have any stride.
    numbers = (
        packed.flatten().view(torch.uint8).view(len(packed), 4 * packed.shape[1])
    )  # [n, W * 4]: lowest first
    if bits == 8:
        return numbers
    # The fewest bytes with a whole number of values.
    units = numbers.view(len(numbers), -1, bits // math.gcd(bits, 8))
    values = []
    for place in range(0, 8 * units.shape[2], bits):
        byte, bit = divmod(place, 8)
        value = units[:, :, byte] >> bit
        if bit + bits > 8:
            value |= units[:, :, byte + 1] << 8 - bit
        values.append(value & (1 << bits) - 1)
    return torch.stack(values, dim=2).flatten(1)


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks values along columns of words: int32 [W, n] -> uint8 [n, W * 32 / bits]."""
    return unpack_columns(packed.T, bits)


def input_order(entry: TensorEntry, inputs: int, group: int) -> torch.Tensor | None:
    """The inputs in the order of their groups: [I] int64. None: they are in order.

    Args:
        entry: The group of each input, [I] int32. All -1: it was not set.
        inputs: I.
        group: The inputs of a group.

    Raises:
        ModelError: A group has another number of inputs.
    """
    groups = read(entry).long()
    if bool((groups == -1).all()):
        return None
    count = -(-inputs // group)
    whole = torch.full((count,), group)
    whole[-1] = inputs - (count - 1) * group
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise ModelError(f"{entry.file}: tensor {entry.name} names a group that is not from 0 to {count - 1}")
    if not torch.equal(torch.bincount(groups, minlength=count), whole):
        raise ModelError(f"{entry.file}: tensor {entry.name} has groups that are not of {group} inputs")
    order = groups.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order
