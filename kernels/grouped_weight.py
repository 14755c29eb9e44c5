"""Weights that are quantised in groups of 32 inputs, and their products with rows that are rounded to bytes.

Formats of GGUF: `Q8_0` has a float16 scale and 32 signed bytes in a group, `Q4_0` a float16 scale and 32
halves of bytes with 8 added. kernels/cpu/grouped_product.h has the layout, how rows are rounded, and the
order of sums, which is the same everywhere: a result has the same bits on each instruction set, and in torch.

Dimension letters: T rows; I inputs; O outputs; G groups; B blocks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import Arguments, can_multiply
from kernels.weight import Weight

Q8_0, Q4_0 = "q8_0", "q4_0"
FORMATS = {Q8_0: 8, Q4_0: 4}
"""The bits of each format, by its name."""

_BLOCK_OUTPUTS = 16
GROUP_INPUTS = 32
# kRoundedRows and sizeof(RowGroup) of grouped_product.h.
_ROUNDED_ROWS, _ROW_GROUP_BYTES = 128, 40
_LEAST = 1e-30
_MOST_HALF = 15
# The rows that are unpacked at a time, which limits memory.
_PART_ROWS = 1024


class GroupedWeight(Weight):
    """A weight [O, I] in groups of 32 inputs. The bits of a product's row do not depend on other rows.

    Attributes:
        bits: Of a value: 8 or 4.
        scales: [B, G, 16] float16, a view.
        values: [B, G, bits, 16, 4] bytes, a view: the outputs of a block are the next to last dimension.
    """

    def __init__(
        self, outputs: int, inputs: int, dtype: torch.dtype, bits: int, empty: Callable[[int], torch.Tensor]
    ) -> None:
        """Allocate a weight, to be filled by `write`.

        Args:
            outputs: O.
            inputs: I.
            dtype: That of rows and results.
            bits: 8 or 4.
            empty: Allocates bytes, which are uninitialised.
        """
        self.shape, self.dtype, self.bits = torch.Size((outputs, inputs)), dtype, bits
        blocks, groups = -(-outputs // _BLOCK_OUTPUTS), -(-inputs // GROUP_INPUTS)
        scale_bytes = (groups + groups % 2) * _BLOCK_OUTPUTS * 2
        self.data = empty(blocks * (scale_bytes + groups * bits * _BLOCK_OUTPUTS * 4))
        parts = self.data.view(blocks, -1)
        if outputs % _BLOCK_OUTPUTS:
            parts[-1].zero_()
        scales, values = parts[:, :scale_bytes], parts[:, scale_bytes:]
        self.scales = scales.view(torch.float16).view(blocks, -1, _BLOCK_OUTPUTS)[:, :groups]
        self.values = values.view(blocks, groups, bits, _BLOCK_OUTPUTS, 4)

    @property
    def address(self) -> int | None:
        """See `Weight`."""
        return self.data.data_ptr() if can_multiply(self.dtype) else None

    def write(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight`: quantises rows [n, I]. Returns their scales, which are finite if the rows are."""
        if first < 0 or first + len(rows) > len(self) or rows.shape[1] != self.shape[1]:
            raise ValueError(f"rows: {[*rows.shape]} from {first} on do not fit into {[*self.shape]}")
        index = torch.arange(first, first + len(rows))
        block, output = index // _BLOCK_OUTPUTS, index % _BLOCK_OUTPUTS
        rows = rows if rows.dtype in SUFFIXES else rows.float()
        if can_multiply(rows.dtype) and rows.stride(1) == 1:
            scales = self._quantise(first, rows).half()
        else:
            scales, values = quantise(rows, self.bits)
            self.values[block, :, :, output] = values.view(*values.shape[:2], self.bits, 4)
        self.scales[block, :, output] = scales
        return scales

    def _quantise(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        """Write the values of rows as `quantise` makes them. Returns the scales [n, G] in float32."""
        scales = torch.empty(len(rows), self.scales.shape[1])
        run = library.function(
            f"quire_quantise_{SUFFIXES[rows.dtype]}", (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 6)
        )
        (count, inputs), threads = rows.shape, torch.get_num_threads()
        addresses = self.data.data_ptr(), scales.data_ptr(), rows.data_ptr()
        run(*addresses, rows.stride(0), first, count, inputs, self.bits, threads)
        return scales

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
        rows, (outputs, inputs) = x.shape[0], self.shape
        out = torch.empty(rows, outputs, dtype=x.dtype)  # [T, O]
        groups = min(rows, _ROUNDED_ROWS) * self.scales.shape[1]
        scratch = torch.empty(groups * _ROW_GROUP_BYTES, dtype=torch.uint8)
        arguments = Arguments(
            out.data_ptr(),
            x.data_ptr(),
            self.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            scratch.data_ptr(),
            rows,
            inputs,
            outputs,
            x.stride(0),
        )
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        run = library.function(f"quire_grouped_linear_{SUFFIXES[x.dtype]}", types)
        run(ctypes.addressof(arguments), self.bits, torch.get_num_threads())
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See `Weight`."""
        block, output = indices // _BLOCK_OUTPUTS, indices % _BLOCK_OUTPUTS
        scales, values = self._of(block, output)
        return (scales.float()[:, :, None] * values).flatten(1)[:, : self.shape[1]].to(self.dtype)

    def dense(self) -> torch.Tensor:
        """See `Weight`."""
        return torch.cat([self.rows(part) for part in torch.split(torch.arange(self.shape[0]), _PART_ROWS)])

    def groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales [O, G] float16, and values [O, G, 32] as signed bytes."""
        index = torch.arange(self.shape[0])
        return self._of(index // _BLOCK_OUTPUTS, index % _BLOCK_OUTPUTS)

    def _of(self, block: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scales[block, :, output], unpacked(self.values[block, :, :, output].flatten(2))


def quantise(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [n, I] as GGUF's reference code does.

    Returns:
        The scales [n, G] as float16, and the bytes of each group as the format stores them: [n, G, bits * 4].
    """
    groups = _in_groups(rows)  # [n, G, 32]
    if bits == FORMATS[Q8_0]:
        scale = groups.abs().amax(2) / 127
        scaled = groups * _inverse(scale)
        # Halves are rounded away from zero.
        whole = scaled.trunc()
        whole += ((scaled - whole).abs() >= 0.5) * scaled.sign()
        values = whole.to(torch.int8).view(torch.uint8)
    else:
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0]
        scale = largest / -8
        halves = (groups * _inverse(scale)).add_(8.5).to(torch.uint8).clamp_(max=_MOST_HALF)
        first, last = halves.chunk(2, dim=2)
        values = first | last << 4
    return scale.half(), values


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """The values of groups, as the formats store them: [n, G, bits * 4] bytes -> [n, G, 32] signed bytes."""
    if values.shape[2] < GROUP_INPUTS:
        values = torch.cat([values & _MOST_HALF, values >> 4], dim=2) - 8
    return values.view(torch.int8)


def _in_groups(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, I] as float32, the last group filled up with zeros: [n, G, 32]."""
    count, inputs = rows.shape
    filled = functional.pad(rows.float(), (0, -inputs % GROUP_INPUTS))
    return filled.view(count, -(-inputs // GROUP_INPUTS), GROUP_INPUTS)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, scale.reciprocal())[:, :, None]


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [T, I] to bytes in groups, as the compiled product does.

    Returns:
        Scales [T, G] float32, NaN for groups with what is not finite; and values [T, G, 32] float32.
    """
    groups = _in_groups(x)  # [T, G, 32]
    most = groups.abs().amax(2)
    usable = (most >= _LEAST) & most.isfinite()
    scale = torch.where(usable, most / 127, torch.where(most < _LEAST, 0.0, math.nan))
    # Not 127 / most, of which torch makes a product with the reciprocal, which is rounded twice.
    inverse = torch.full_like(most, 127).div_(most)
    values = groups * torch.where(usable, inverse, 0.0)[:, :, None]
    return scale, torch.where(usable[:, :, None], values, 0.0).round()


def grouped_reference(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in torch, with the bits of the compiled one; see `kernels.linear.linear`."""
    scales, values = weight.groups()
    row_scales, row_values = round_rows(x)
    sums = torch.zeros(len(x), weight.shape[0])  # [T, O]
    for group in range(scales.shape[1]):
        # Exact: integers below 2^24.
        whole = row_values[:, group] @ values[:, group].float().T
        scale = row_scales[:, group, None] * scales[:, group].float()  # rounded to float32
        # The product of 24 and 20 bits is exact in float64, so that the sum is rounded nearly as a fused one.
        sums = (scale.double() * whole.double() + sums.double()).float()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)
