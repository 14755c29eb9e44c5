"""The layout of quantised weights in memory, which the compiled products of the CPU read.

A weight is blocks of 16 outputs, a block chunks of 8 groups of 32 inputs; the last chunk of a block may
have fewer. A chunk is its parts one after the other: scales, minima, zero points, subscales and subminima,
each with 16 outputs next to each other, then zeros up to a multiple of 64 bytes, and values.

The values of a group are planes of 8, 4, 2 or 1 bits: 6 bits are a plane of 4 bits and one of the 2 above
them. A plane of p bits is [p, 16 outputs, 4 inputs] bytes. The group's inputs, 4 by 4, are the lowest p
bits of these p, then the next p bits of all of them, and so on.

The last block is filled up with zeros. kernels/cpu/group_format.h has the same.

Dimension letters: n rows; O outputs; G groups; S scales of a row; B blocks; C chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kernels.group_formats import CHUNK_GROUPS, GROUP_INPUTS, GroupFormat

_BLOCK_OUTPUTS = 16
_STEP_INPUTS = 4
_STEPS = GROUP_INPUTS // _STEP_INPUTS
_LINE_BYTES = 64
# The bits of planes, the lowest first, for values of so many bits.
_PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows of a weight: what `kernels.group_formats` has in its formula. None: the format has no such part.

    Attributes:
        values: [n, G, 32] uint8: u.
        scales: [n, S], of the format's dtype.
        minima: [n, S], of the scales' dtype; of super-blocks what subminima are multiplied by and what is
            then taken off.
        zeros: [n, S] int8.
        subscales: [n, G * subscales] int8; or bytes of two halves, see `GroupFormat.packs_subscales`.
        subminima: [n, G * subscales] int8.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    subscales: torch.Tensor | None = None
    subminima: torch.Tensor | None = None

    def factors(self) -> dict[str, torch.Tensor]:
        """All but the values, by their names."""
        named = {name: getattr(self, name) for name in self.__slots__ if name != "values"}
        return {name: part for name, part in named.items() if part is not None}

    def cut(self, form: GroupFormat, taken: range) -> Parts:
        """The parts of some inputs, in the format `form.cut(taken.start)`.

        Args:
            form: The format of all inputs.
            taken: Which. They begin with a group, and end with one or with the row.
        """
        groups = range(taken.start // GROUP_INPUTS, -(-taken.stop // GROUP_INPUTS))
        span = form.cut(taken.start).span

        def of_scales(part: torch.Tensor | None) -> torch.Tensor | None:
            if part is None:
                return None
            repeated = part.repeat_interleave(form.span // span, dim=1)
            return repeated[:, groups.start // span : -(-groups.stop // span)]

        def of_groups(part: torch.Tensor | None) -> torch.Tensor | None:
            each = form.subscales
            return None if part is None else part[:, groups.start * each : groups.stop * each]

        scales = of_scales(self.scales)
        assert scales is not None
        return Parts(
            self.values[:, groups.start : groups.stop],
            scales,
            of_scales(self.minima),
            of_scales(self.zeros),
            of_groups(self.subscales),
            of_groups(self.subminima),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One of a chunk's parts, but for the values: [count, 16] of a dtype in each chunk."""

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * _BLOCK_OUTPUTS * self.dtype.itemsize


class _Chunk:
    """A chunk of so many groups."""

    def __init__(self, form: GroupFormat, groups: int) -> None:
        self.groups, self._bits = groups, form.bits
        scales, subscales = -(-groups // form.span), groups * form.subscales
        parts = (
            _Part("scales", form.scale_dtype, scales),
            _Part("minima", form.scale_dtype, scales if form.minima else 0),
            _Part("zeros", torch.int8, scales if form.zeros else 0),
            _Part("subscales", torch.int8, subscales),
            _Part("subminima", torch.int8, subscales if form.minima and not form.packs_subscales else 0),
        )
        self.parts = [part for part in parts if part.count]
        before = sum(part.nbytes for part in self.parts)
        self._values_at = -(-before // _LINE_BYTES) * _LINE_BYTES
        self.nbytes = self._values_at + groups * form.bits * _BLOCK_OUTPUTS * _STEP_INPUTS

    def sections(self, chunks: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the parts of chunks [B, C, bytes], by their names: [B, C, count, 16]."""
        at = 0
        for part in self.parts:
            section = chunks[:, :, at : at + part.nbytes].view(part.dtype)
            yield part.name, section.view(*chunks.shape[:2], part.count, _BLOCK_OUTPUTS)
            at += part.nbytes

    def planes(self, chunks: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The bits of each plane, those below it, and a view of it: [B, C, groups, bits, 16, 4]."""
        of_groups = chunks[:, :, self._values_at :].view(
            *chunks.shape[:2], self.groups, self._bits, _BLOCK_OUTPUTS, _STEP_INPUTS
        )
        below = 0
        for bits in _PLANES[self._bits]:
            yield bits, below, of_groups[:, :, :, below : below + bits]
            below += bits


class Layout:
    """The layout of one weight.

    Attributes:
        nbytes: Of the weight.
    """

    def __init__(self, form: GroupFormat, outputs: int, groups: int) -> None:
        """Lay out a weight of so many outputs and groups."""
        self._outputs, self._blocks = outputs, -(-outputs // _BLOCK_OUTPUTS)
        whole, rest = divmod(groups, CHUNK_GROUPS)
        chunks = (whole, _Chunk(form, CHUNK_GROUPS)), (1, _Chunk(form, rest))
        self._chunks = [(count, chunk) for count, chunk in chunks if count * chunk.groups]
        self._block_bytes = sum(count * chunk.nbytes for count, chunk in self._chunks)
        self.nbytes = self._blocks * self._block_bytes

    def clear_rest(self, data: torch.Tensor) -> None:
        """Fill up the last block with zeros, if it is not whole."""
        if self._outputs % _BLOCK_OUTPUTS:
            data[-self._block_bytes :].zero_()

    def write_factors(self, data: torch.Tensor, first: int, factors: Mapping[str, torch.Tensor]) -> None:
        """Write all but the values of rows from `first` on, by their names in `Parts`."""
        index = torch.arange(first, first + len(factors["scales"]))
        block, output = index // _BLOCK_OUTPUTS, index % _BLOCK_OUTPUTS
        done = dict.fromkeys(factors, 0)
        for chunk, chunks in self._of(data):
            for name, section in chunk.sections(chunks):
                begin = done[name]
                done[name] += section.shape[1] * section.shape[2]
                taken = factors[name][:, begin : done[name]]
                section[block, :, :, output] = taken.reshape(len(index), *section.shape[1:3])

    def write_values(self, data: torch.Tensor, first: int, values: torch.Tensor) -> None:
        """Write the values [n, G, 32] of rows from `first` on."""
        index = torch.arange(first, first + len(values))
        block, output = index // _BLOCK_OUTPUTS, index % _BLOCK_OUTPUTS
        done = 0
        for chunk, chunks in self._of(data):
            end = done + chunks.shape[1] * chunk.groups
            taken = values[:, done:end].view(len(index), -1, chunk.groups, GROUP_INPUTS)
            for bits, below, plane in chunk.planes(chunks):
                plane[block, :, :, :, output] = _packed(taken, bits, below)
            done = end

    def read(self, data: torch.Tensor, indices: torch.Tensor) -> Parts:
        """Read rows."""
        block, output = indices // _BLOCK_OUTPUTS, indices % _BLOCK_OUTPUTS
        found: dict[str, list[torch.Tensor]] = {}
        for chunk, chunks in self._of(data):
            for name, section in chunk.sections(chunks):
                found.setdefault(name, []).append(section[block, :, :, output].flatten(1))
            planes = (
                _unpacked(plane[block, :, :, :, output], bits) << below
                for bits, below, plane in chunk.planes(chunks)
            )
            values = next(planes)
            for plane in planes:
                values |= plane
            found.setdefault("values", []).append(values.flatten(1, 2))
        return Parts(**{name: torch.cat(parts, dim=1) for name, parts in found.items()})

    def _of(self, data: torch.Tensor) -> Iterator[tuple[_Chunk, torch.Tensor]]:
        """Views of chunks of the same size: [B, C, bytes]."""
        blocks, at = data.view(self._blocks, self._block_bytes), 0
        for count, chunk in self._chunks:
            end = at + count * chunk.nbytes
            yield chunk, blocks[:, at:end].view(self._blocks, count, chunk.nbytes)
            at = end


def _packed(values: torch.Tensor, bits: int, below: int) -> torch.Tensor:
    """The plane of values [n, C, groups, 32] with so many bits, `below` others: [n, C, groups, bits, 4]."""
    mask, shifts = (1 << bits) - 1, _STEPS // bits
    taken = (values >> below & mask).view(*values.shape[:3], shifts, bits, _STEP_INPUTS)
    packed = taken[:, :, :, 0].clone()
    for shift in range(1, shifts):
        packed |= taken[:, :, :, shift] << bits * shift
    return packed


def _unpacked(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, C, groups, bits, 4] -> [n, C, groups, 32]."""
    mask = (1 << bits) - 1
    return torch.cat([(plane >> shift & mask).flatten(3) for shift in range(0, 8, bits)], dim=3)
