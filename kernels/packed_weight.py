"""Weights in the layout that the compiled products of the CPU read: see kernels/cpu/packed_product.h.

Dimension letters: I inputs; O outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import COPIED_ROWS, Arguments, copied_rows
from kernels.weight import Weight

BLOCK_OUTPUTS = 16
_GROUP_INPUTS = 32
# The part of a weight that is copied while it is packed in place.
_PART_BYTES = 1 << 20


class PackedWeight(Weight):
    """A packed weight [O, I] of bfloat16 or float32. The bits of a product's row do not depend on other rows.

    Attributes:
        shape: [O, I], without what fills up the last blocks.
        dtype: The dtype of the weight.
        data: The blocks, flat.
    """

    def __init__(self, weight: torch.Tensor, *, in_place: bool = False) -> None:
        """Pack a weight [O, I]. `in_place`: overwrite its memory, if it consists of whole blocks."""
        self.shape = weight.shape
        self.dtype = weight.dtype
        outputs, inputs = filled_up(weight.shape, weight.dtype)
        if in_place and (outputs, inputs) == tuple(weight.shape) and weight.is_contiguous():
            self.data = weight.view(-1)
            blocks = max(_PART_BYTES // (BLOCK_OUTPUTS * inputs * weight.element_size()), 1)
            for first in range(0, outputs, blocks * BLOCK_OUTPUTS):
                part = weight[first : first + blocks * BLOCK_OUTPUTS]
                part.view(-1).copy_(_in_blocks(part))
        else:
            if (outputs, inputs) != tuple(weight.shape):
                weight = functional.pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))
            self.data = _in_blocks(weight)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        batch_invariant: bool = False,  # noqa: ARG002 - it always is
    ) -> torch.Tensor:
        """See `Weight`. Requires `kernels.cpu.linear.can_multiply`."""
        rows, inputs = x.shape
        out = torch.empty(rows, len(self), dtype=x.dtype)  # [T, O]
        scratch = copied_rows(x.dtype, min(rows, COPIED_ROWS), inputs)
        arguments = Arguments.of(out, x, self.data, bias, scratch)
        run = library.function(f"quire_linear_{SUFFIXES[x.dtype]}", (ctypes.c_void_p, ctypes.c_int64))
        run(ctypes.addressof(arguments), torch.get_num_threads())
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, a new tensor: [n] -> [n, I]. The indices must be from 0 to O - 1."""
        blocks = self._blocks()[indices // BLOCK_OUTPUTS, :, indices % BLOCK_OUTPUTS]  # [n, steps, step]
        return blocks.flatten(1)[:, : self.shape[1]].contiguous()

    def dense(self) -> torch.Tensor:
        """The weight [O, I] as a new tensor."""
        plain = self._blocks().transpose(1, 2).flatten(2).flatten(0, 1)
        return plain[: self.shape[0], : self.shape[1]].contiguous()

    def _blocks(self) -> torch.Tensor:
        """[blocks, steps, 16, inputs of a step], a view."""
        outputs, inputs = filled_up(self.shape, self.dtype)
        step = step_inputs(self.dtype)
        return self.data.view(outputs // BLOCK_OUTPUTS, inputs // step, BLOCK_OUTPUTS, step)


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A weight of whole blocks [O, I] in their order, flat; a new tensor."""
    outputs, inputs = weight.shape
    # The inputs of a step as one number: torch copies those six times as fast as pairs.
    size = (outputs // BLOCK_OUTPUTS, BLOCK_OUTPUTS, inputs // step_inputs(weight.dtype))
    return weight.view(torch.int32).view(size).transpose(1, 2).flatten().view(weight.dtype)


def filled_up(shape: torch.Size, dtype: torch.dtype) -> tuple[int, int]:
    """Outputs and inputs with what fills up the last blocks."""
    group = 1
    if dtype is torch.bfloat16:
        group = _GROUP_INPUTS if shape[1] >= _GROUP_INPUTS else 2
    return -(-shape[0] // BLOCK_OUTPUTS) * BLOCK_OUTPUTS, -(-shape[1] // group) * group


def step_inputs(dtype: torch.dtype) -> int:
    """The inputs of an output that are next to each other in a block."""
    return 2 if dtype is torch.bfloat16 else 1
