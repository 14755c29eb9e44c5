"""Products of each head with a matrix of its own, as latent attention has before and after attention.

The bits of a row do not depend on the other rows if weights are packed, or on a GPU.

Dimension letters: T tokens; H heads; I inputs; O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from kernels.checks import FLOAT_DTYPES, check_same, check_tensor
from kernels.linear import DenseWeight, can_pack, linear
from kernels.weight import Weight

# [H, O, I] contiguous; or packed, [O, I] of each head.
HeadWeights: TypeAlias = torch.Tensor | Sequence[Weight]


def pack_heads(weights: torch.Tensor) -> HeadWeights:
    """The matrices [H, O, I] as the kernels of their device read them. They may be overwritten."""
    if not can_pack(weights):
        return weights
    return [DenseWeight(own.contiguous()).packed() for own in weights]


def head_products(x: torch.Tensor, weights: HeadWeights, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply.

    Args:
        x: [T, H, I]; float32, bfloat16 or float16; any strides but the last, which is 1.
        weights: Of the same dtype.
        out: [T, H, O], written, of the same dtype; any strides but the last, which is 1. None: a new tensor.

    Returns:
        `out`.

    Raises:
        ValueError, TypeError: `x` or `out` is invalid; the message names it.
    """
    outputs, inputs = weights[0].shape
    check_tensor("x", x, (None, len(weights), inputs), FLOAT_DTYPES)
    if out is None:
        out = x.new_empty(len(x), len(weights), outputs)
    check_tensor("out", out, (len(x), len(weights), outputs), FLOAT_DTYPES)
    check_same("out", out, "x", x)
    if isinstance(weights, torch.Tensor):
        if x.is_cuda:
            from kernels.cuda import head_products as cuda

            cuda.head_products(out, x, weights)
            return out
        weights = [DenseWeight(own) for own in weights]
    parts = x.transpose(0, 1).contiguous()  # [H, T, I]
    for head, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        out[:, head] = linear(part, weight)
    return out
