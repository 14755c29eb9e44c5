"""Projections: x W^T + b, with W packed on the CPU if there is a compiled product for its dtype.

The compiled product reads a packed weight once and in order. The packed weight replaces the plain one: it has
about the same size.

The bits of a row do not depend on the other rows if the weight is packed, or on a GPU if that is asked for.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import linear as cpu
from kernels.packed_weight import PackedWeight
from kernels.weight import Weight


class DenseWeight(Weight):
    """A plain tensor [O, I], or a vector."""

    def __init__(self, data: torch.Tensor) -> None:
        """Take ownership of the tensor."""
        self.shape, self.dtype, self.data = data.shape, data.dtype, data

    @property
    def compiled(self) -> None:
        """None: compiled kernels do not read plain matrices."""
        return None

    @property
    def plain(self) -> torch.Tensor:
        """The tensor."""
        return self.data

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        if batch_invariant and x.is_cuda:
            from kernels.cuda import linear as cuda

            return cuda.linear(x, self.data, bias)
        return functional.linear(x, self.data, bias)

    def write(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        return self.data[first : first + len(rows)].copy_(rows, non_blocking=True)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, self.data)

    def dense(self) -> torch.Tensor:
        return self.data

    def packed(self) -> Weight:
        return pack_weight(self.data, in_place=True)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_weight` packs this matrix."""
    return weight.device.type == "cpu" and cpu.can_multiply(weight.dtype)


def pack_weight(weight: torch.Tensor, *, in_place: bool = False) -> Weight:
    """Pack a matrix [O, I], if there is a compiled product for it.

    Args:
        weight: The matrix.
        in_place: Its memory may be overwritten, so that it is not in memory twice.
    """
    return PackedWeight(weight, in_place=in_place) if can_pack(weight) else DenseWeight(weight)


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Project rows.

    Args:
        x: [T, I]; float32, bfloat16 or float16.
        weight: [O, I] of the same dtype.
        bias: [O] of the same dtype.
        batch_invariant: On a GPU, the bits of a row must not depend on the others; the weight is contiguous.

    Returns:
        A new tensor [T, O] with the dtype of x.

    Raises:
        ValueError, TypeError: `x` is invalid.
    """
    check_tensor("x", x, (None, weight.shape[1]), FLOAT_DTYPES)
    if x.dtype is not weight.dtype:
        raise TypeError(f"x: must have the weight's dtype, {weight.dtype}, got {x.dtype}")
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    return weight.multiply(x, bias, batch_invariant=batch_invariant)
