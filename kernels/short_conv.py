"""The gated short convolution of LFM2, in torch, and that in front of a scan.

With gates b and c of inputs x, all of them projections of a row, and u = b * x:

    y[t] = c[t] * (sum over j < L of w[j] * u[t - (L - 1) + j] + bias)

The state is the last L - 1 rows of u. Source: `Lfm2ShortConv` in the transformers library, modeling_lfm2.py.
kernels/cpu/causal_conv.h computes the same bits, kernels/cuda/causal_conv.py the same but for roundings.

Dimension letters: T rows; C channels; L taps.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.cpu import state_scan as cpu
from kernels.cpu.dtypes import can_run
from kernels.state_rows import StateRows, past_rows


def short_conv(
    projected: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """Convolve the rows of a batch. Mutates `states`: writes those that are kept.

    The bits of a row depend only on the tokens up to it.

    Args:
        projected: [T, 3 * C]: b, c, x.
        taps: [L, C], that of the row itself is the last one. Of the dtype of rows, as all others.
        bias: [C], or None.
        states: [slots, L - 1, C].
        at: Which states the rows follow.

    Returns:
        [T, C]
    """
    if projected.is_cuda:
        from kernels.cuda.causal_conv import causal_conv

        return causal_conv(projected, taps, bias, states, at, is_gated=True)
    return short_conv_reference(projected, taps, bias, states, at)


def short_conv_reference(
    projected: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """See `short_conv`. In torch, of any device and dtype."""
    gates, out_gates, inputs = projected.chunk(3, dim=1)  # [T, C] each
    return out_gates * _convolved(gates * inputs, taps, bias, states, at)


def silu_conv(
    raw: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `silu_conv_reference`; by kernels, where they are. Rows may be apart."""
    if raw.is_cuda:
        from kernels.cuda.causal_conv import causal_conv

        return causal_conv(raw, taps, bias, inputs, at, is_gated=False)
    if can_run(raw):
        return cpu.silu_conv(raw, taps, bias, inputs, at)
    return silu_conv_reference(raw, taps, bias, inputs, at)


def silu_conv_reference(
    raw: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """A convolution without gates, and silu. Mutates `inputs`, which are its states as in `short_conv`.

    Args:
        raw: [T, C]
        taps: [L, C]
        bias: [C], or None.
        inputs: [slots, L - 1, C]
        at: Which states the rows follow.

    Returns:
        [T, C]
    """
    return functional.silu(_convolved(raw, taps, bias, inputs, at))


def _convolved(
    inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """[T, C] -> [T, C]. Mutates `states`: writes those that are kept."""
    rows, length = torch.arange(len(inputs), device=inputs.device), len(taps)
    total, *others = (
        past_rows(inputs, rows, length - 1 - tap, states, at).float() * taps[tap].float()
        for tap in range(length)
    )
    for product in others:
        total = total + product
    if bias is not None:
        total = total + bias.float()
    kept, slots = at.kept
    last = [past_rows(inputs, kept, back, states, at) for back in range(length - 2, -1, -1)]
    states[slots] = torch.stack(last, dim=1)
    return total.to(inputs.dtype)
