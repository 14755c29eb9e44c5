"""How quantised weights are held: formats by name, and what each of their parts is.

A value is an unsigned integer u of a few bits. In a group of 32 inputs, or in each half of it, it stands
for

    scale * (u - offset - zero) + minimum

or with a table for scale * TABLES[table][u]. A `span` of groups shares a scale in floating point, and so a
minimum and a zero point. Super-blocks of GGUF's "k" formats have a smaller integer for each group or half
beside it: scale and minimum of the group are products of both, which are exact in float32.

The formats of files are kept without loss: those that GGUF defines, see `kernels.gguf_blocks`, and integers
in groups of 32, 64, 128 or more, or of a whole row, which have many names: GPTQ, AWQ, compressed-tensors,
MLX.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

GROUP_INPUTS = 32
CHUNK_GROUPS = 8
"""The groups whose scales and values are next to each other in memory, which are those of a super-block."""

TABLES = (
    (),
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    (
        *(-28776, -20034, -15110, -11364, -8185, -5317, -2620, 0),
        *(2290, 4631, 7082, 9724, 12682, 16190, 20804, 28776),
    ),
    (0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48),
)
"""What values stand for: in "iq4_nl" and "iq4_xs", as GGUF defines them; twice 4-bit floats (e2m1); and of
bitsandbytes NF4 times 28,776, and FP4 times 192. Of all factors up to 2^15 that is the one with which NF4's
numbers are nearest to integers: none is off by more than 3.3e-5 of itself, a 59th of bfloat16's rounding."""
WIDE_TABLES = range(3, 5)
"""The tables with 16-bit numbers. A product takes two passes: over the lower and the upper bytes."""

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A format.

    Attributes:
        name: Of GGUF, or one that says what it is.
        bits: Those of a value: 2, 3, 4, 5, 6 or 8.
        offset: Taken off each value.
        scale_dtype: That of scales: float16, bfloat16 or float32.
        span: The groups of 32 inputs that share a scale: 1, 2, 4 or 8.
        repeats: How often each scale of a source is repeated; 0: a source has one for a row.
        subscales: The integers beside a scale for a group: 0: none; 1; 2: for each half of it.
        minima: Whether a number of the scales' dtype is added to scaled values; with subscales less that
            times an integer.
        zeros: Whether a zero point is taken off each value, an integer of 8 bits.
        table: Which of `TABLES` has what values stand for; 0: they are numbers.
        rounds_rows: Whether a CPU rounds what it multiplies by, to 8 bits in groups.
    """

    name: str
    bits: int
    offset: int = 0
    scale_dtype: torch.dtype = torch.float16
    span: int = 1
    repeats: int = 1
    subscales: int = 0
    minima: bool = False
    zeros: bool = False
    table: int = 0
    rounds_rows: bool = True

    def __post_init__(self) -> None:
        # As `find_factors` of kernels/cpu/group_chunk.h takes it.
        assert not (self.subscales and self.zeros) and (self.minima or not self.packs_subscales), self

    @property
    def packs_subscales(self) -> bool:
        """Whether a byte has both integers of a half group: the scale's are the low 4 bits."""
        return self.subscales > 0 and self.bits == 2  # "q2_k"

    def cut(self, first: int) -> GroupFormat:
        """The format of inputs from `first` on, a multiple of 32: scales may be shared by fewer groups."""
        return dataclasses.replace(self, span=math.gcd(self.span, first // GROUP_INPUTS))

    @property
    def address(self) -> int:
        """The address of the same format for the compiled kernels."""
        return ctypes.addressof(_compiled(self))


class CompiledFormat(ctypes.Structure):
    """GroupFormat of kernels/cpu/group_format.h: the fields must agree."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("bits", "offset", "scale_kind", "span", "subscales"),
            *("packs_subscales", "minima", "zeros", "table", "rounds_rows"),
        )
    )


@functools.cache
def _compiled(form: GroupFormat) -> CompiledFormat:
    """Kept for ever: weights refer to its memory. There are few formats."""
    kind = _SCALE_DTYPES.index(form.scale_dtype)
    shared = form.span, form.subscales, form.packs_subscales, form.minima, form.zeros, form.table
    return CompiledFormat(form.bits, form.offset, kind, *shared, form.rounds_rows)


FORMATS: Mapping[str, GroupFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            GroupFormat("q8_0", bits=8, offset=128),
            GroupFormat("q4_0", bits=4, offset=8),
            GroupFormat("q4_1", bits=4, minima=True),
            GroupFormat("q5_0", bits=5, offset=16),
            GroupFormat("q5_1", bits=5, minima=True),
            GroupFormat("q2_k", bits=2, span=8, subscales=2, minima=True),
            GroupFormat("q3_k", bits=3, offset=4, span=8, subscales=2),
            GroupFormat("q4_k", bits=4, span=8, subscales=1, minima=True),
            GroupFormat("q5_k", bits=5, span=8, subscales=1, minima=True),
            GroupFormat("q6_k", bits=6, offset=32, span=8, subscales=2),
            GroupFormat("iq4_nl", bits=4, table=1),
            GroupFormat("iq4_xs", bits=4, span=8, subscales=1, table=1),
            # Its scales are powers of two, halved: 2^-128 to 2^126. So they take 16 bits, and not 8.
            GroupFormat("mxfp4", bits=4, scale_dtype=torch.bfloat16, table=2),
        )
    }
)
"""The formats of GGUF's files, by their names there."""


def integer_groups(
    bits: int, group: int, scale_dtype: torch.dtype, *, zeros: bool, minima: bool = False
) -> GroupFormat:
    """The format of integers with a scale for each group of inputs.

    Args:
        bits: 2, 3, 4, 5, 6 or 8.
        group: Inputs that share a scale: 32, 64, 128, or a multiple of 256; 0: all of a row.
        scale_dtype: float16, bfloat16 or float32.
        zeros: Whether groups have zero points.
        minima: Whether they have minima.

    Raises:
        ValueError: There is no such format here; the message says what there is.
    """
    if bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"values of {bits} bits are not supported: only of 2, 3, 4, 5, 6 and 8")
    chunk = CHUNK_GROUPS * GROUP_INPUTS
    if group not in (0, 32, 64, 128) and (group < 0 or group % chunk):
        raise ValueError(
            f"groups of {group} inputs are not supported: only of 32, 64, 128, multiples of {chunk} and rows"
        )
    if scale_dtype not in _SCALE_DTYPES:
        raise ValueError(f"scales of {scale_dtype} are not supported: only of float16, bfloat16 and float32")
    is_long = group == 0 or group > chunk
    span, repeats = (CHUNK_GROUPS, group // chunk) if is_long else (group // GROUP_INPUTS, 1)
    offset = 1 << bits - 1 if bits == 8 or not (zeros or minima) else 0
    dtype = str(scale_dtype).removeprefix("torch.")
    beside = ", zero points" if zeros else ", minima" if minima else ""
    name = f"int{bits}, groups of {group or 'a row'}, scales of {dtype}{beside}"
    return GroupFormat(name, bits, offset, scale_dtype, span, repeats, minima=minima, zeros=zeros)


def table_groups(name: str, group: int) -> GroupFormat:
    """The format of values in a table of bitsandbytes, with a float32 for each group of inputs.

    Args:
        name: "nf4" or "fp4".
        group: See `integer_groups`.

    Raises:
        ValueError: There are no such groups here.
    """
    integers = integer_groups(4, group, torch.float32, zeros=False)
    table = WIDE_TABLES[("nf4", "fp4").index(name)]
    return dataclasses.replace(integers, name=f"{name}, groups of {group or 'a row'}", offset=0, table=table)
