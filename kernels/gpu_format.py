"""The layout of quantised weights in a GPU's memory, which `kernels.cuda.dequantise` reads.

A row of a weight is a row of bytes: first the values, of 4 or 8 bits; then scales, minima, zero points,
subscales and subminima, as in `kernels.group_layout.Parts`; and zeros up to a multiple of 16 bytes. Two
values of 4 bits are in one byte, the first in its lower half. Values of 2 and 3 bits take 4, and those of 5
and 6 bits take 8.

Does not import Triton.

Dimension letters: n rows; I inputs; G groups of 32 inputs; S scales of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.group_formats import GROUP_INPUTS, TABLES, GroupFormat
from kernels.group_layout import Parts

_ALIGNMENT = 16
_SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How a weight is held; one is a compile-time constant of the kernels.

    Attributes:
        bits: Those of a value: 4 or 8.
        kind: "integer"; "float8": e4m3; or "table": places in one of `TABLES`.
        offset: Taken off each integer.
        scale_dtype: That of scales by name.
        group: The inputs that share a scale: 32, 64, 128 or 256.
        subscales: See `GroupFormat`, as the following ones.
        packs_subscales: Whether a byte has both integers of a half group.
        minima: Whether something is added to scaled values.
        zeros: Whether a zero point is taken off each value.
        table: Which of `TABLES` has what values stand for; 0: they are numbers.
    """

    bits: int
    kind: str
    offset: int
    scale_dtype: str
    group: int
    subscales: int = 0
    packs_subscales: bool = False
    minima: bool = False
    zeros: bool = False
    table: int = 0

    @classmethod
    def of(cls, form: GroupFormat, *, is_float8: bool = False) -> GpuFormat:
        """How a format is held. `is_float8`: its values are 8-bit floats."""
        return cls(
            bits=4 if form.bits <= 4 else 8,
            kind="float8" if is_float8 else "table" if form.table else "integer",
            offset=form.offset,
            scale_dtype=str(form.scale_dtype).removeprefix("torch."),
            group=form.span * GROUP_INPUTS,
            subscales=form.subscales,
            packs_subscales=form.packs_subscales,
            minima=form.minima,
            zeros=form.zeros,
            table=form.table,
        )

    @property
    def unit(self) -> int:
        """The inputs with one factor: those of a group, or with subscales of a part of 32."""
        return GROUP_INPUTS // self.subscales if self.subscales else self.group

    @property
    def sums_subminima(self) -> bool:
        """Whether subminima have bytes of their own."""
        return self.minima and self.subscales > 0 and not self.packs_subscales

    def row_bytes(self, inputs: int) -> int:
        """The bytes of a row with so many inputs."""
        *_, (_, at, nbytes) = self._sections(inputs)
        return -(-(at + nbytes) // _ALIGNMENT) * _ALIGNMENT

    def packed(self, parts: Parts, inputs: int) -> torch.Tensor:
        """Rows as they are in memory: [n, bytes of a row] uint8, where `parts` are.

        Args:
            parts: Rows in the format that this one was made of.
            inputs: Those of a row.
        """
        values = parts.values.flatten(1)  # [n, G * 32]
        if self.bits == 4:
            values = values[:, ::2] | values[:, 1::2] << 4
        pieces = {"values": values, **parts.factors()}
        rows = torch.zeros(len(values), self.row_bytes(inputs), dtype=torch.uint8, device=values.device)
        for name, at, nbytes in self._sections(inputs):
            rows[:, at : at + nbytes] = pieces[name].contiguous().view(torch.uint8)
        return rows

    def _sections(self, inputs: int) -> Iterator[tuple[str, int, int]]:
        """Names of parts, where each begins in a row, and its bytes. `dequantise.tile` has the same."""
        groups = -(-inputs // GROUP_INPUTS)
        scales = -(-groups * GROUP_INPUTS // self.group)
        sizes = {
            "values": groups * GROUP_INPUTS * self.bits // 8,
            "scales": scales * _SCALE_DTYPES[self.scale_dtype].itemsize,
            "minima": scales * _SCALE_DTYPES[self.scale_dtype].itemsize * self.minima,
            "zeros": scales * self.zeros,
            "subscales": groups * self.subscales,
            "subminima": groups * self.subscales * self.sums_subminima,
        }
        at = 0
        for name, nbytes in sizes.items():
            if nbytes:
                yield name, at, nbytes
            at += nbytes


def is_gpu(device: torch.device) -> bool:
    """Whether quantised weights on a device have this layout."""
    return device.type == "cuda"


def table_of(form: GpuFormat, device: torch.device) -> torch.Tensor | None:
    """[16] float32, the numbers that codes stand for. None: values are numbers themselves."""
    return torch.tensor(TABLES[form.table], dtype=torch.float32, device=device) if form.table else None
