"""Products of up to 16 rows on a GPU, with the norm before them and the gate or the residual after them.

    y = x W^T + b                       of normed rows, if a norm is given
    y = activation(gate) * up           if there is a gate; W has the rows of gate, then those of up
    residual += y                       if there is a residual

Everything is rounded where the separate operations round: normed rows, y before the gate and before the
residual, the activation, and the result; see `kernels.rms_norm` and `kernels.gated_activation`. Only the
order of sums differs.

A product that adds to the residual also returns the sums of the squares of its rows, in parts, from which the
next product can normalise them; see `kernels.cuda.few_rows`.

Dimension letters: T rows; I inputs; O outputs; P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.checks import FLOAT_DTYPES, check_same, check_tensor
from kernels.few_rows_tiles import MOST_ROWS, Tiles
from kernels.gated_activation import Activation
from kernels.gpu_format import GpuFormat
from kernels.rms_norm import check_norm_weight


class Quantised(NamedTuple):
    """How a weight is quantised.

    Attributes:
        form: Its format.
        table: `kernels.gpu_format.table_of` it.
    """

    form: GpuFormat
    table: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class NormBefore:
    """The RMSNorm of the rows of a product.

    Attributes:
        weight: [I]; dtype of x, or float32.
        eps: Added to the mean square; positive.
        squares: [P, MOST_ROWS] float32, of the rows of x, from the product that has written them.
    """

    weight: torch.Tensor
    eps: float
    squares: torch.Tensor


def few_rows_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiles: Tiles,
    *,
    norm: NormBefore | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    quantised: Quantised | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply rows. On a GPU, or in Triton's interpreter.

    Mutates `residual`, which becomes residual + y.

    Args:
        x: [T, I], 1 to MOST_ROWS rows; float32, bfloat16 or float16.
        weight: [O, I], with a gate [2 * O, I], contiguous; dtype of x. If it is quantised, bytes of rows.
        bias: As long as the weight; dtype of x.
        tiles: One of `tiles_for`.
        norm: What is done to x before; None: nothing.
        activation: That of the gate; None: there is none.
        residual: [T, O]; dtype of x. None: the result is a new tensor.
        quantised: How the weight is; None: it is not.

    Returns:
        The result [T, O], and with a residual its squares, for `NormBefore`.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
    """
    if quantised is None:
        check_same("weight", weight, "x", x)
        check_tensor("x", x, (None, weight.shape[1]), FLOAT_DTYPES)
    else:
        check_tensor("x", x, (None, None), FLOAT_DTYPES)
        check_tensor("weight", weight, (None, quantised.form.row_bytes(x.shape[1])), (torch.uint8,))
    if not 1 <= len(x) <= MOST_ROWS:
        raise ValueError(f"x: must have 1 to {MOST_ROWS} rows, got {len(x)}")
    if not weight.is_contiguous():
        raise ValueError(f"weight: must be contiguous, got strides {weight.stride()}")
    outputs = len(weight) // 2 if activation is not None else len(weight)
    if norm is not None:
        check_tensor("norm.weight", norm.weight, x.shape[1:], FLOAT_DTYPES)
        check_norm_weight("norm.weight", norm.weight, "x", x)
        check_tensor("norm.squares", norm.squares, (None, MOST_ROWS), (torch.float32,))
    if residual is not None:
        check_tensor("residual", residual, (len(x), outputs), FLOAT_DTYPES)
        check_same("residual", residual, "x", x)
    from kernels.cuda import few_rows as cuda

    kernel = None
    if quantised is not None:
        from kernels.cuda.few_rows_quantised import variant

        of_form = variant(tiles, activation, quantised.form, residual=residual is not None)
        kernel = of_form, quantised.table
    before = None if norm is None else (norm.weight, norm.squares, norm.eps)
    return cuda.product(x, weight, bias, tiles, before, activation, residual, kernel)
