"""Projections: x W^T + b, with W packed for the matrix library if that is faster.

oneDNN multiplies bfloat16 fastest from a blocked layout, in which it reads the weight once and in order. A
plain matrix costs extra work in every call. The packed matrix replaces the plain one: it has about the same
size, and only `linear` can read it.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import linear as cpu

# A hint for the layout. In measurements it did not change the speed at other numbers of rows.
_TYPICAL_ROWS = 32


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_weight` packs this weight: it is bfloat16, on a CPU that multiplies bfloat16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and not weight.is_mkldnn
        and cpu.packs_bfloat16()
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight [O, I] for `linear`.

    Returns:
        An opaque tensor of about the same size, or the weight itself if it cannot be packed.
    """
    if not can_pack(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X W^T + b in plain torch; see `linear`. `weight` is not packed."""
    return functional.linear(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Project rows.

    Args:
        x: [T, I]; float32, bfloat16 or float16.
        weight: [O, I] of the same dtype, plain or from `pack_weight`.
        bias: [O] of the same dtype.

    Returns:
        A new tensor [T, O] with the dtype of x.

    Raises:
        ValueError, TypeError: `x` is invalid.
    """
    check_tensor("x", x, (None, weight.shape[1]), FLOAT_DTYPES)
    if not weight.is_mkldnn or not len(x):
        return linear_reference(x, weight, bias) if len(x) else x.new_empty(0, weight.shape[0])
    if cpu.can_multiply(x, weight):
        return cpu.multiply(x, weight, bias)
    projected: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return projected
