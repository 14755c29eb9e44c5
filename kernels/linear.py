"""Projections: x W^T + b, with W packed on the CPU if there is a compiled product for its dtype.

The compiled product reads a packed weight once and in order. The packed weight replaces the plain one: it has
about the same size, and only `linear` can read it.

The bits of a row do not depend on the other rows if the weight is packed, or on a GPU if that is asked for.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import linear as cpu
from kernels.packed_weight import PackedWeight

# A matrix [O, I], plain or packed.
Weight = torch.Tensor | PackedWeight


def can_pack(weight: Weight) -> bool:
    """Whether `pack_weight` packs this weight."""
    return isinstance(weight, torch.Tensor) and weight.device.type == "cpu" and cpu.can_multiply(weight.dtype)


def pack_weight(weight: Weight, *, in_place: bool = False) -> Weight:
    """Pack a weight [O, I] for `linear`.

    Args:
        weight: The weight.
        in_place: The memory of the weight may be overwritten, so that the weight is not in memory twice.

    Returns:
        The packed weight, or the weight itself if it cannot be packed.
    """
    if isinstance(weight, torch.Tensor) and can_pack(weight):
        return PackedWeight(weight, in_place=in_place)
    return weight


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X W^T + b in plain torch; see `linear`. `weight` is not packed."""
    return functional.linear(x, weight, bias)


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """Project rows.

    Args:
        x: [T, I]; float32, bfloat16 or float16.
        weight: [O, I] of the same dtype, plain or from `pack_weight`.
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
    if isinstance(weight, PackedWeight):
        return cpu.multiply(x, weight, bias)
    if batch_invariant and x.is_cuda:
        from kernels.cuda import linear as cuda

        return cuda.linear(x, weight, bias)
    return linear_reference(x, weight, bias)
