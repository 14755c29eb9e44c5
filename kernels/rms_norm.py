"""RMSNorm, plain and with the residual added first.

    y = weight * cast(x / sqrt(mean(x^2) + eps))

The mean and the division are computed in float32. If the weight has the dtype of x, the quotient is rounded
to that dtype *before* it is multiplied by the weight, as in Hugging Face's Qwen3RMSNorm and LlamaRMSNorm, so
that bf16 agrees too. With a float32 weight the product is computed in float32 and rounded once, as in
Gemma3RMSNorm, whose weight is 1 + w, and in Olmo2RMSNorm.

Dimension letters: T tokens; H heads (absent for a whole row); D normalised width.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.checks import FLOAT_DTYPES, check_same, check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES, can_run
from kernels.cpu.library import doubles, integers, pointers


class _Arguments(ctypes.Structure):
    """NormArguments of rms_norm.h: the fields must agree."""

    _fields_ = (
        *pointers("out x residual weight"),
        *integers("rows width out_stride x_stride residual_stride wide_weight"),
        *doubles("eps"),
    )


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in plain torch; see `rms_norm`."""
    wide = x.float()  # [..., D]
    variance = wide.pow(2).mean(-1, keepdim=True)  # [..., 1]
    unit = wide * torch.rsqrt(variance + eps)  # [..., D]
    normed = weight * unit.to(weight.dtype)  # [..., D]
    return normed if weight.dtype is x.dtype else normed.to(x.dtype)


def check_norm_weight(name: str, weight: torch.Tensor, other_name: str, x: torch.Tensor) -> None:
    """Check that a weight has the dtype of x, or float32, and the device of x. Raises TypeError."""
    if weight.dtype is not torch.float32 or weight.device != x.device:
        check_same(name, weight, other_name, x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension.

    Args:
        x: [T, D], or [T, H, D] to normalise each head; float32, bfloat16 or float16.
        weight: [D], or [H, D] for a weight per head; dtype of x, or float32.
        eps: Added to the mean square; positive.

    Returns:
        A new tensor with the shape and dtype of x.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
    """
    check_tensor("x", x, [None] * x.dim(), FLOAT_DTYPES)
    if x.dim() not in (2, 3):
        raise ValueError(f"x: must have 2 or 3 dimensions, got {x.dim()}")
    check_tensor("weight", weight, x.shape[x.dim() - weight.dim() :], FLOAT_DTYPES)
    if weight.dim() >= x.dim():
        raise ValueError(f"weight: must have fewer dimensions than x, got {weight.dim()} and {x.dim()}")
    check_norm_weight("weight", weight, "x", x)
    if x.is_cuda:
        from kernels.cuda import rms_norm as cuda

        return cuda.rms_norm(x, weight, eps)
    if x.dim() == 2 and can_run(x):
        return _compiled(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Residual add, then RMSNorm, in plain torch; see `add_rms_norm`."""
    residual.add_(x)  # [T, D], rounded to its dtype as the unfused model does
    return rms_norm_reference(residual, weight, eps)  # [T, D]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual stream and normalise the sum.

    Mutates `residual`, which becomes residual + x.

    Args:
        x: [T, D], the output of the previous sublayer; float32, bfloat16 or float16.
        residual: [T, D], the residual stream; dtype of x.
        weight: [D]; dtype of x, or float32.
        eps: Added to the mean square; positive.

    Returns:
        A new tensor [T, D], the norm of the sum.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
    """
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check_tensor("residual", residual, x.shape, FLOAT_DTYPES)
    check_same("residual", residual, "x", x)
    check_tensor("weight", weight, x.shape[1:], FLOAT_DTYPES)
    check_norm_weight("weight", weight, "x", x)
    if x.is_cuda:
        from kernels.cuda import rms_norm as cuda

        return cuda.add_rms_norm(x, residual, weight, eps)
    if can_run(x):
        return _compiled(x, weight, eps, residual)
    return add_rms_norm_reference(x, residual, weight, eps)


def _compiled(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rms_norm`, or with a residual `add_rms_norm`, of rows [T, D]. Requires `can_run`."""
    out = torch.empty(x.shape, dtype=x.dtype)  # [T, D]
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        *x.shape,
        x.shape[1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        weight.dtype is torch.float32,
        eps,
    )
    run = library.function(f"quire_rms_norm_{SUFFIXES[x.dtype]}", (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
