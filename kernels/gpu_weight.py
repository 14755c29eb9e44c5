"""Quantised weights in a GPU's memory, where they stay quantised.

Up to `MOST_ROWS` rows are multiplied by one kernel, which dequantises in registers (`kernels.cuda.few_rows`).
For more rows, and where the bits of a row must not depend on their number, some rows of the weight at a time
are dequantised into memory of a bounded size, and multiplied as those of a dense weight. Either way elements
are rounded to the dtype of what they multiply, and that is not rounded to 8 bits as on the CPU.

Dimension letters: n, T rows; I inputs; O outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.few_rows import Quantised, few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, tiles_of_size
from kernels.float8_weight import Float8Format
from kernels.gpu_format import GpuFormat, table_of
from kernels.group_formats import CHUNK_GROUPS, GROUP_INPUTS, GroupFormat
from kernels.group_layout import Parts
from kernels.grouped_weight import AnyGroupedWeight, repeated

# The size of dequantised rows at a time: small for a GPU, and large enough for products at full speed.
SCRATCH_BYTES = 64 << 20
# Rows that are dequantised at a time are a multiple of those of a product's tile.
_TILE_OUTPUTS = 128


class GpuWeight(AnyGroupedWeight):
    """A weight [O, I] of any format.

    Attributes:
        data: [O, bytes of a row] uint8.
        quantised: How it is held.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        form: GroupFormat | Float8Format,
        empty: Callable[[int], torch.Tensor],
        taken: range | None = None,
    ) -> None:
        """Allocate a weight, to be filled by a function that writes; see `GroupedWeight`."""
        is_float8 = isinstance(form, Float8Format)
        within = _float8_groups(form) if isinstance(form, Float8Format) else form
        super().__init__(outputs, inputs, dtype, within, taken)
        held = GpuFormat.of(self.form, is_float8=is_float8)
        row_bytes = held.row_bytes(self.shape[1])
        # What is after the inputs of a row must be finite.
        self.data = empty(outputs * row_bytes).zero_().view(outputs, row_bytes)
        self.quantised = Quantised(held, table_of(held, self.data.device))

    @property
    def compiled(self) -> None:
        """None: the weight is on a GPU."""
        return None

    def write(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        return super().write(first, rows.cpu())

    def write_values(self, first: int, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Fill a weight of 8-bit floats; see `Float8Weight.write_values`."""
        self._check(first, values, self._stored_inputs)
        padding = -values.shape[1] % GROUP_INPUTS
        groups = functional.pad(values.view(torch.uint8), (0, padding)).view(len(values), -1, GROUP_INPUTS)
        of_groups = repeated(scales, self._stored, -(-groups.shape[1] // self._stored.span))
        self.write_parts(first, Parts(groups, of_groups).cut(self._stored, self._taken))
        return values.float().abs().amax(1)[:, None] * scales

    def write_parts(self, first: int, parts: Parts) -> None:
        """Write rows as the format has them."""
        rows = self.quantised.form.packed(parts, self.shape[1])
        self.data[first : first + len(rows)].copy_(rows)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        if len(x) <= MOST_ROWS and not batch_invariant:
            tiles = tiles_of_size(x.dtype, len(self))
            return few_rows_product(x, self.data, bias, tiles, quantised=self.quantised)[0]
        from kernels.cuda.linear import linear as invariant_linear

        product = invariant_linear if batch_invariant else functional.linear
        out = x.new_empty(len(x), len(self))  # [T, O]
        rows = SCRATCH_BYTES // max(1, self.shape[1] * x.itemsize)
        step = max(1, rows // _TILE_OUTPUTS) * _TILE_OUTPUTS
        for first in range(0, len(self), step):
            part = slice(first, first + step)
            dense = self._rows(range(len(self))[part])
            out[:, part] = product(x, dense, None if bias is None else bias[part])
        return out

    def view(self, rows: range) -> GpuWeight:
        """Consecutive rows, in the same memory."""
        found = copy.copy(self)
        found.shape = torch.Size((len(rows), self.shape[1]))
        found.data = self.data[rows.start : rows.stop]
        return found

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self._rows(indices)

    def dense(self) -> torch.Tensor:
        return self._rows(range(len(self)))

    def _rows(self, indices: torch.Tensor | range) -> torch.Tensor:
        from kernels.cuda.dequantise import dequantise

        return dequantise(self.data, *self.quantised, indices, self.shape[1], self.dtype)


def _float8_groups(form: Float8Format) -> GroupFormat:
    """The groups of 8-bit floats: of 32, 64, 128 or 256 inputs, as many as share a scale."""
    span = CHUNK_GROUPS
    while form.scale_inputs % (span * GROUP_INPUTS):
        span //= 2
    repeats = form.scale_inputs // (span * GROUP_INPUTS)
    return GroupFormat(form.name, 8, scale_dtype=torch.float32, span=span, repeats=repeats)
