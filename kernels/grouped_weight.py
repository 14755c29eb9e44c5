"""Weights that are quantised in groups of inputs, and their products with rows, rounded to bytes or not.

kernels/group_formats.py has the formats, kernels/group_layout.py the layout in memory.
kernels/cpu/grouped_product.h has how rows are rounded, and the order of sums, which is the same everywhere:
a result has the same bits on each instruction set, and in torch. Where the format does not round rows, it has
those of the dequantised weight in float32, see kernels/cpu/dequantised_product.h.

Dimension letters: n, T rows; I inputs; O outputs; G groups; H groups, or half groups where these have scales.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import COPIED_ROWS, ROUNDED_ROWS, Arguments, can_multiply, copied_rows, rounded_rows
from kernels.dequantise import dequantised, factors, integers
from kernels.gguf_blocks import parts_of
from kernels.group_formats import CHUNK_GROUPS, GROUP_INPUTS, WIDE_TABLES, GroupFormat
from kernels.group_layout import Layout, Parts
from kernels.quantisers import in_groups, quantise
from kernels.weight import CompiledPart, Weight

_LEAST = 1e-30
# The rows that are unpacked at a time, which limits memory.
_PART_ROWS = 1024


class AnyGroupedWeight(Weight):
    """A weight [O, I] that is filled with rows in groups of inputs, wherever it is.

    Attributes:
        form: Its format.
    """

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, form: GroupFormat, taken: range | None
    ) -> None:
        """Describe a weight, whose memory is not there yet; see `GroupedWeight`."""
        self._stored, self._stored_inputs, self._taken = form, inputs, taken or range(inputs)
        self.shape, self.dtype = torch.Size((outputs, len(self._taken))), dtype
        self.form = form.cut(self._taken.start)

    def write(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight`: quantises whole rows, to `QUANTISERS`. Returns scales and minima."""
        self._check(first, rows, self._stored_inputs)
        return self._write(first, quantise(rows, self._stored).cut(self._stored, self._taken))

    def write_blocks(self, first: int, raw: torch.Tensor) -> torch.Tensor:
        """Write rows of a GGUF file, without loss.

        Args:
            first: The first row.
            raw: [n, bytes of a row] uint8, of whole rows.

        Returns:
            Their scales and minima, in any shape: finite in a sound file.

        Raises:
            ValueError: They are not rows of this weight.
        """
        self._check(first, raw, raw.shape[1])
        parts = parts_of(self.form.name, raw, self._stored_inputs)
        return self._write(first, parts.cut(self._stored, self._taken))

    def _write(self, first: int, parts: Parts) -> torch.Tensor:
        """Returns scales and minima, in any shape."""
        self.write_parts(first, parts)
        return parts.scales if parts.minima is None else torch.cat([parts.scales, parts.minima], dim=1)

    def write_groups(
        self,
        first: int,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        minima: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write rows of integers, without loss: scale * (value - zero) + minimum, or scale * table[value].

        Args:
            first: The first row.
            values: [n, inputs of a whole row] int8 or, with zero points or a table, uint8: one integer a
                byte, within the format's bits. With minima uint8 of fewer than 8 bits, or int8.
            scales: [n, groups of the format], of its dtype.
            zeros: Zero points like the values: [n, groups]; None: they are 0.
            minima: Like the scales; None: there are none.

        Returns:
            The scales: finite in a sound file.

        Raises:
            ValueError: They are not rows of this weight.
        """
        self._check(first, values, self._stored_inputs)
        parts = _integers(self._stored, values, scales, zeros, minima)
        self.write_parts(first, parts.cut(self._stored, self._taken))
        return scales

    @abstractmethod
    def write_parts(self, first: int, parts: Parts) -> None:
        """Write rows as the format has them."""

    def _check(self, first: int, rows: torch.Tensor, width: int) -> None:
        if first < 0 or first + len(rows) > len(self) or rows.shape[1:] != (width,):
            raise ValueError(f"rows: {[*rows.shape]} from {first} on do not fit into {[*self.shape]}")


class GroupedWeight(AnyGroupedWeight):
    """A weight [O, I] in a CPU's memory. The bits of a product's row do not depend on other rows."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        form: GroupFormat,
        empty: Callable[[int], torch.Tensor],
        taken: range | None = None,
    ) -> None:
        """Allocate a weight, to be filled by a function that writes.

        Args:
            outputs: O.
            inputs: Those of a row that is written without loss.
            dtype: That of rows and results.
            form: The format of such a row.
            empty: Allocates bytes, which are uninitialised.
            taken: Which of the inputs the weight has; see `Parts.cut`. None: all.
        """
        super().__init__(outputs, inputs, dtype, form, taken)
        self._layout = Layout(self.form, outputs, -(-self.shape[1] // GROUP_INPUTS))
        self.data = empty(self._layout.nbytes)
        self._layout.clear_rest(self.data)

    @property
    def compiled(self) -> list[CompiledPart] | None:
        """See `Weight`."""
        if not can_multiply(self.dtype):
            return None
        return [CompiledPart(self.data.data_ptr(), self.form.address, len(self))]

    def write_parts(self, first: int, parts: Parts) -> None:
        """Write rows as the format has them."""
        self._layout.write_factors(self.data, first, parts.factors())
        if not library.available():
            self._layout.write_values(self.data, first, parts.values)
            return
        values, types = parts.values.contiguous(), (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 4)
        addresses = self.data.data_ptr(), self.form.address, values.data_ptr()
        run = library.function("quire_write_values", types)
        run(*addresses, first, *values.shape[:2], torch.get_num_threads())

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        batch_invariant: bool = False,  # noqa: ARG002 - it always is
    ) -> torch.Tensor:
        """See `Weight`."""
        if not can_multiply(x.dtype):
            return grouped_reference(x, self, bias)
        rows = len(x)
        out = torch.empty(rows, len(self), dtype=x.dtype)  # [T, O]
        scratch = (
            rounded_rows(min(rows, ROUNDED_ROWS), self.shape[1])
            if self.form.rounds_rows
            else copied_rows(x.dtype, min(rows, COPIED_ROWS), self.shape[1])
        )
        arguments = Arguments.of(out, x, self.data, bias, scratch)
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        run = library.function(f"quire_grouped_linear_{SUFFIXES[x.dtype]}", types)
        run(ctypes.addressof(arguments), self.form.address, torch.get_num_threads())
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See `Weight`."""
        if not library.available():
            # Outputs that only pad a block also have rows.
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
                raise IndexError(f"indices: must be from 0 to {len(self) - 1}")
            return dequantised(self.form, self.parts(indices))[:, : self.shape[1]].to(self.dtype)
        indices = indices.to(torch.int64).contiguous()
        found = torch.empty(len(indices), self.shape[1])
        types = *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4
        addresses = found.data_ptr(), self.data.data_ptr(), self.form.address, indices.data_ptr()
        run = library.function("quire_group_rows", types, ctypes.c_bool)
        if not run(*addresses, *found.shape, len(self), torch.get_num_threads()):
            raise IndexError(f"indices: must be from 0 to {len(self) - 1}")
        return found.to(self.dtype)

    def dense(self) -> torch.Tensor:
        """See `Weight`."""
        return torch.cat([self.rows(part) for part in torch.split(torch.arange(len(self)), _PART_ROWS)])

    def parts(self, indices: torch.Tensor) -> Parts:
        """What some rows consist of."""
        return self._layout.read(self.data, indices)


def _integers(
    form: GroupFormat,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    minima: torch.Tensor | None,
) -> Parts:
    is_signed = values.dtype is torch.int8
    given = zeros is not None, minima is not None
    if scales.dtype is not form.scale_dtype or given != (form.zeros, form.minima):
        raise ValueError(
            f"{form.name}: scales of {scales.dtype}, zero points and minima {given}, are not of this format"
        )
    takes = {
        torch.int8: form.zeros or form.offset > 0,
        torch.uint8: form.zeros or form.offset == 0,
    }
    if not takes.get(values.dtype):
        raise ValueError(f"{form.name}: values of {values.dtype} are not of this format")
    moved = 1 << form.bits - 1 if is_signed else 0
    unsigned = functional.pad(values, (0, -values.shape[1] % GROUP_INPUTS)).view(torch.uint8) + moved
    if len(unsigned) and int(unsigned.max()) >> form.bits:
        raise ValueError(f"{form.name}: a value has more bits")
    groups = unsigned.view(len(unsigned), -1, GROUP_INPUTS)
    count = -(-groups.shape[1] // form.span)
    if zeros is not None:
        zeros = repeated((zeros.view(torch.uint8) + moved - form.offset).view(torch.int8), form, count)
    if minima is not None:
        minima = repeated(minima, form, count)
    return Parts(groups, repeated(scales, form, count), minima=minima, zeros=zeros)


def repeated(of_groups: torch.Tensor, form: GroupFormat, count: int) -> torch.Tensor:
    """What a source has for each of its groups, for those of the format: [n, any] -> [n, count].

    Raises ValueError if a source has not as many.
    """
    found = of_groups.repeat_interleave(form.repeats or count, dim=1)[:, :count]
    if found.shape[1] != count or of_groups.shape[1] != -(-count // (form.repeats or count)):
        raise ValueError(
            f"{form.name}: a row has {of_groups.shape[1]} groups, which are not {count} of this format"
        )
    return found


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [T, I] to bytes in groups, as the compiled product does.

    Returns:
        Scales [T, G] float32, NaN for groups with what is not finite; and values [T, G, 32] float32.
    """
    groups = in_groups(x)  # [T, G, 32]
    most = groups.abs().amax(2)
    usable = (most >= _LEAST) & most.isfinite()
    scale = torch.where(usable, most / 127, torch.where(most < _LEAST, 0.0, math.nan))
    # Not 127 / most, of which torch makes a product with the reciprocal, which is rounded twice.
    inverse = torch.full_like(most, 127).div_(most)
    values = groups * torch.where(usable, inverse, 0.0)[:, :, None]
    return scale, torch.where(usable[:, :, None], values, 0.0).round()


def grouped_reference(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in torch, with the bits of the compiled one if rows are rounded; see `linear`."""
    parts = weight.parts(torch.arange(len(weight)))
    if not weight.form.rounds_rows:
        matrix = dequantised(weight.form, parts)[:, : weight.shape[1]]
        return functional.linear(x.float(), matrix, None if bias is None else bias.float()).to(x.dtype)
    scales, minima = factors(weight.form, parts)  # [O, H]
    values = integers(weight.form, parts).view(*scales.shape, -1)  # [O, H, 32 or 16]
    row_scales, row_values = round_rows(x)
    row_scales = row_scales.repeat_interleave(max(weight.form.subscales, 1), dim=1)  # [T, H]
    row_values = row_values.view(*row_scales.shape, -1)  # [T, H, 32 or 16]
    # What minima are multiplied by, rounded to float32: [T, H]
    row_sums = row_scales * row_values.sum(2)
    planes = [(values, 1.0)]
    if weight.form.table in WIDE_TABLES:
        upper = ((values + 128) / 256).floor()
        planes = [(values - 256 * upper, 1.0), (upper, 256.0)]
    sums = torch.zeros(len(x), len(weight))  # [T, O]
    chunk = CHUNK_GROUPS * max(weight.form.subscales, 1)
    for first in range(0, scales.shape[1], chunk):
        groups = range(first, min(first + chunk, scales.shape[1]))
        for (plane, factor), group in itertools.product(planes, groups):
            # Exact: integers below 2^24.
            whole = row_values[:, group] @ plane[:, group].T
            scale = row_scales[:, group, None] * (factor * scales[:, group])  # rounded to float32
            # Products are exact in float64, so that the sum is rounded nearly as a fused one.
            sums = (scale.double() * whole.double() + sums.double()).float()
            if minima is not None:
                sums = (minima[:, group].double() * row_sums[:, group, None].double() + sums.double()).float()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)
