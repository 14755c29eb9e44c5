"""Mamba 2 between its projections: convolution, scan of a state, gate and norm.

A row of projections has gates z, the inputs of a convolution, and a step dt for each head. The convolution
and silu make inputs x, and B and C of each group of heads. Of each head, with a state S [N, P]:

    dt = max(softplus(dt + dt_bias), least_step),  S = exp(dt * A) * S + outer(B, dt * x),  y = C @ S + D * x
    out = norm(y * silu(z)), of each group, or without a norm

Source: "Transformers are SSMs" (arXiv 2405.21060), and `GraniteMoeHybridMambaLayer` in the library.
Tokens are scanned one after the other, so that bits do not depend on chunks.

Dimension letters: T rows; I = H * P inner width; H heads; P width of a head; G groups; N width of a state;
D = I + 2 * G * N; L taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.cpu import state_scan as cpu
from kernels.cpu.dtypes import can_run
from kernels.short_conv import silu_conv, silu_conv_reference
from kernels.state_rows import StateRows, scanned_rows


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The parameters.

    Attributes:
        taps: [L, D], of the convolution, in the dtype of rows.
        bias: [D], likewise, or None.
        dt_bias: [H] float32.
        decays: [H] float32, A.
        direct: [H] float32, D.
        norm: [I], in the dtype of rows; None: there is none.
        groups: G.
        state_width: N.
        eps: Of the norm.
        least_step: Of dt.
    """

    taps: torch.Tensor
    bias: torch.Tensor | None
    dt_bias: torch.Tensor
    decays: torch.Tensor
    direct: torch.Tensor
    norm: torch.Tensor | None
    groups: int
    state_width: int
    eps: float
    least_step: float = 0.0

    @property
    def inner(self) -> int:
        """I."""
        return self.taps.shape[1] - 2 * self.groups * self.state_width

    @property
    def parts(self) -> list[int]:
        """The widths of x, B and C."""
        return [self.inner, *[self.groups * self.state_width] * 2]

    def compiled(self) -> cpu.Mamba2Weights:
        """The arguments of the CPU's kernels, valid as long as these tensors exist."""
        heads = len(self.decays)
        return cpu.Mamba2Weights(
            self.taps.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            *(each.data_ptr() for each in (self.dt_bias, self.decays, self.direct)),
            None if self.norm is None else self.norm.data_ptr(),
            *(heads, self.inner // heads, self.groups, self.state_width, len(self.taps)),
            *(self.eps, self.least_step),
        )


def mamba2(
    projected: torch.Tensor,
    weights: Mamba2Weights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """Run the rows of a batch. Mutates `inputs` and `states`: writes those that are kept.

    Args:
        projected: [T, I + D + H] contiguous.
        weights: The parameters.
        inputs: [slots, L - 1, D], the last inputs of the convolution.
        states: [slots, H, N, P] float32.
        at: Which states the rows follow.

    Returns:
        [T, I]
    """
    if projected.is_cuda:
        return _on_gpu(projected, weights, inputs, states, at)
    if can_run(projected):
        return cpu.scan(projected, weights.compiled(), inputs, states, at)
    return mamba2_reference(projected, weights, inputs, states, at)


def mamba2_reference(
    projected: torch.Tensor,
    weights: Mamba2Weights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """See `mamba2`. In torch, of any device and dtype."""
    inner, heads = weights.inner, len(weights.decays)
    gates, raw, steps = torch.split(projected, [inner, weights.taps.shape[1], heads], dim=1)
    convolved = silu_conv_reference(raw, weights.taps, weights.bias, inputs, at)
    x, into, out_of = torch.split(convolved.float(), weights.parts, dim=1)
    rows = len(projected)
    x = x.reshape(rows, heads, -1)  # [T, H, P]
    into, out_of = (
        each.view(rows, weights.groups, -1).repeat_interleave(heads // weights.groups, dim=1)  # [T, H, N]
        for each in (into, out_of)
    )
    dt = functional.softplus(steps.float() + weights.dt_bias).clamp(min=weights.least_step)  # [T, H]
    y = torch.empty_like(x)
    for row, state in scanned_rows(states, at):  # [H, N, P]
        state.mul_(torch.exp(dt[row] * weights.decays)[:, None, None])
        state.add_(into[row][:, :, None] * (x[row] * dt[row][:, None])[:, None])
        y[row] = (out_of[row][:, None] @ state)[:, 0] + x[row] * weights.direct[:, None]
    gated = y.flatten(1) * functional.silu(gates.float())
    if weights.norm is None:
        return gated.to(projected.dtype)
    grouped = gated.view(rows, weights.groups, -1)
    normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + weights.eps)
    out: torch.Tensor = weights.norm.float() * normed.flatten(1)
    return out.to(projected.dtype)


def _on_gpu(
    projected: torch.Tensor,
    weights: Mamba2Weights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """See `mamba2`. In three launches."""
    from kernels.cuda.gated_norm import gated_norm
    from kernels.cuda.state_scan import Heads, state_scan

    inner, heads, groups = weights.inner, len(weights.decays), weights.groups
    gates, raw, steps = torch.split(projected, [inner, weights.taps.shape[1], heads], dim=1)
    convolved = silu_conv(raw, weights.taps, weights.bias, inputs, at)
    x, into, out_of = torch.split(convolved, weights.parts, dim=1)
    y = state_scan(
        *((out_of, into, x), steps, weights.dt_bias, weights.decays, states, at),
        Heads(heads, groups, heads // groups),
        direct=weights.direct,
        least_step=weights.least_step,
    )
    return gated_norm(y, gates, weights.norm, inner // groups, weights.eps)
