"""Weights of 8-bit floats (e4m3) with scales, which take one byte for each value.

An element is value * scale in float32, rounded to the weight's dtype: as the transformers library dequantises
them. The compiled product does not round them (kernels/cpu/float8_product.h): it is more exact than one with
the dequantised weight, and has the same bits on each instruction set.

Dimension letters: T rows; I inputs; O outputs; S scales of an output; B blocks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import COPIED_ROWS, Arguments, can_multiply, copied_rows
from kernels.packed_weight import BLOCK_OUTPUTS, filled_up, step_inputs
from kernels.weight import CompiledPart, Weight

# A step of the compiled kernel, and of the layout of bfloat16, must have one scale.
_LEAST_INPUTS = 32
# The rows that are dequantised at a time in torch, which limits memory.
_PART_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Float8Format:
    """How a weight of 8-bit floats is held.

    Attributes:
        scale_inputs: The inputs with one scale: a multiple of 32; 0: all of an output.
    """

    scale_inputs: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.scale_inputs % _LEAST_INPUTS:
            raise ValueError(
                f"scales must be of multiples of {_LEAST_INPUTS} inputs, got {self.scale_inputs}"
            )

    @property
    def name(self) -> str:
        """Its name."""
        return f"float8 in {self.scale_inputs}" if self.scale_inputs else "float8"


class Float8Weight(Weight):
    """A weight [O, I] of 8-bit floats. The bits of a product's row do not depend on other rows.

    Attributes:
        format: How it is held.
        scales: [B, S, 16] float32, a view.
        values: [B, steps, 16, inputs of a step] bytes, a view.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        weight_format: Float8Format,
        empty: Callable[[int], torch.Tensor],
        taken: range | None = None,
    ) -> None:
        """Allocate a weight, to be filled by `write_values`.

        Args:
            outputs: O.
            inputs: Those of a row that is written.
            dtype: That of rows and results.
            weight_format: How it is held.
            empty: Allocates bytes, which are uninitialised.
            taken: Which of the inputs the weight has. They begin at a multiple of 32. None: all.
        """
        self._taken, self._stored_inputs = taken or range(inputs), inputs
        self._stored_scale_inputs = weight_format.scale_inputs or max(inputs, 1)
        inputs = len(self._taken)
        self.shape, self.dtype, self.format = torch.Size((outputs, inputs)), dtype, weight_format
        # A scale that both sides of a cut need is there twice.
        of_block = math.gcd(self._stored_scale_inputs, self._taken.start)
        self._scale_inputs = of_block if weight_format.scale_inputs else max(inputs, 1)
        filled_outputs, filled_inputs = filled_up(self.shape, dtype)
        blocks, scales, step = filled_outputs // BLOCK_OUTPUTS, self.num_scales, step_inputs(dtype)
        scale_bytes = scales * BLOCK_OUTPUTS * 4
        self.data = empty(blocks * (scale_bytes + BLOCK_OUTPUTS * filled_inputs))
        parts = self.data.view(blocks, -1)
        if (filled_outputs, filled_inputs) != (outputs, inputs):
            parts[:, scale_bytes:].zero_()
            parts[-1].zero_()
        self.scales = parts[:, :scale_bytes].view(torch.float32).view(blocks, scales, BLOCK_OUTPUTS)
        self.values = parts[:, scale_bytes:].view(blocks, filled_inputs // step, BLOCK_OUTPUTS, step)

    @property
    def num_scales(self) -> int:
        """The number of scales of an output."""
        return -(-self.shape[1] // self._scale_inputs)

    @property
    def compiled(self) -> list[CompiledPart] | None:
        """See `Weight`."""
        if not can_multiply(self.dtype):
            return None
        return [CompiledPart(self.data.data_ptr(), None, len(self), self._scale_inputs)]

    def write_values(self, first: int, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Fill it: replace the rows from `first` on.

        Args:
            first: The first row.
            values: [n, inputs of a whole row] as float8_e4m3fn.
            scales: [n, scales of a whole row] float32.

        Returns:
            The largest element of each row: finite if all are.
        """
        count, inputs = values.shape
        if first < 0 or first + count > len(self) or inputs != self._stored_inputs:
            raise ValueError(f"values: {[*values.shape]} from {first} on do not fit into {[*self.shape]}")
        num_scales = -(-inputs // self._stored_scale_inputs)
        if scales.shape != (count, num_scales):
            raise ValueError(f"scales: must be [{count}, {num_scales}], got {[*scales.shape]}")
        values, scales = self._cut(values, scales)
        index = torch.arange(first, first + count)
        block, output = index // BLOCK_OUTPUTS, index % BLOCK_OUTPUTS
        self.scales[block, :, output] = scales
        steps, step = self.values.shape[1], self.values.shape[3]
        filled = functional.pad(values.view(torch.uint8), (0, steps * step - self.shape[1]))
        self.values[block, :, output] = filled.view(count, steps, step)
        return self.rows(index).abs().amax(1)

    def _cut(self, values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of whole rows that this weight has."""
        own = values[:, self._taken.start : self._taken.stop]
        if not self.format.scale_inputs:
            return own, scales
        repeated = scales.repeat_interleave(self._stored_scale_inputs // self._scale_inputs, dim=1)
        begin = self._taken.start // self._scale_inputs
        return own, repeated[:, begin : begin + self.num_scales]

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        batch_invariant: bool = False,  # noqa: ARG002 - it always is
    ) -> torch.Tensor:
        """See `Weight`."""
        if not can_multiply(x.dtype):
            return functional.linear(x, self.dense(), bias)
        rows, inputs = x.shape
        out = torch.empty(rows, len(self), dtype=x.dtype)  # [T, O]
        scratch = copied_rows(x.dtype, min(rows, COPIED_ROWS), inputs)
        arguments = Arguments.of(out, x, self.data, bias, scratch)
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        run = library.function(f"quire_float8_linear_{SUFFIXES[x.dtype]}", types)
        run(ctypes.addressof(arguments), self._scale_inputs, torch.get_num_threads())
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See `Weight`."""
        return self._elements(indices).to(self.dtype)

    def dense(self) -> torch.Tensor:
        """See `Weight`."""
        return torch.cat([self.rows(part) for part in torch.split(torch.arange(len(self)), _PART_ROWS)])

    def _elements(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows in float32: [n] -> [n, I]."""
        block, output = indices // BLOCK_OUTPUTS, indices % BLOCK_OUTPUTS
        values = self.values[block, :, output].flatten(1)[:, : self.shape[1]]
        scales = self.scales[block, :, output].repeat_interleave(self._scale_inputs, 1)[:, : self.shape[1]]
        return values.contiguous().view(torch.float8_e4m3fn).float() * scales
