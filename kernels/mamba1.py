"""Mamba 1 after its inner projections: the scan of a state, and the gate.

Of each channel, with x, a step dt, a gate z and a state S [N], and with B and C of the row:

    dt = softplus(dt + dt_bias),  S = exp(dt * A) * S + B * dt * x,  y = C @ S + D * x,  out = y * silu(z)

Source: "Mamba" (arXiv 2312.00752), and `JambaMambaMixer` in the transformers library.
Tokens are scanned one after the other, so that bits do not depend on chunks.

Dimension letters: T rows; I channels, in H heads of P, so that a vector has those of adjacent channels; N
width of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.cpu import state_scan as cpu
from kernels.cpu.dtypes import can_run
from kernels.state_rows import StateRows, scanned_rows


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """The parameters, all float32.

    Attributes:
        dt_bias: [I].
        decays: [H, N, P], A.
        direct: [I], D.
    """

    dt_bias: torch.Tensor
    decays: torch.Tensor
    direct: torch.Tensor

    @property
    def parts(self) -> list[int]:
        """The widths of x, dt, z, B and C."""
        inner, state_width = len(self.direct), self.decays.shape[1]
        return [inner, inner, inner, state_width, state_width]

    def compiled(self) -> cpu.Mamba1Weights:
        """The arguments of the CPU's kernels, valid as long as these tensors exist."""
        heads, state_width, head_width = self.decays.shape
        tensors = (self.dt_bias, self.decays, self.direct)
        return cpu.Mamba1Weights(*(each.data_ptr() for each in tensors), heads, head_width, state_width)


def mamba1(rows: torch.Tensor, weights: Mamba1Weights, states: torch.Tensor, at: StateRows) -> torch.Tensor:
    """Run the rows of a batch. Mutates `states`: writes those that are kept.

    Args:
        rows: [T, 3 * I + 2 * N] contiguous: x, dt, z, B, C.
        weights: The parameters.
        states: [slots, H, N, P] float32.
        at: Which states the rows follow.

    Returns:
        [T, I]
    """
    if rows.is_cuda:
        return _on_gpu(rows, weights, states, at)
    if can_run(rows):
        return cpu.mamba1(rows, weights.compiled(), states, at)
    return mamba1_reference(rows, weights, states, at)


def mamba1_reference(
    rows: torch.Tensor, weights: Mamba1Weights, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """See `mamba1`. In torch, of any device and dtype."""
    heads = len(weights.decays)
    x, steps, gates, into, out_of = torch.split(rows.float(), weights.parts, dim=1)
    dt = functional.softplus(steps + weights.dt_bias)  # [T, I]
    change, dt = (each.view(len(rows), heads, 1, -1) for each in (x * dt, dt))
    y = torch.empty_like(x)
    for row, state in scanned_rows(states, at):  # [H, N, P]
        state.mul_(torch.exp(dt[row] * weights.decays))
        state.add_(change[row] * into[row][:, None])
        y[row] = (out_of[row][:, None] * state).sum(1).flatten()
    return ((y + x * weights.direct) * functional.silu(gates)).to(rows.dtype)


def _on_gpu(rows: torch.Tensor, weights: Mamba1Weights, states: torch.Tensor, at: StateRows) -> torch.Tensor:
    """See `mamba1`. In two launches."""
    from kernels.cuda.gated_norm import gated_norm
    from kernels.cuda.state_scan import Heads, state_scan

    heads = len(weights.decays)
    x, steps, gates, into, out_of = torch.split(rows, weights.parts, dim=1)
    y = state_scan(
        *((out_of, into, x), steps, weights.dt_bias, weights.decays, states, at),
        Heads(heads, 1, heads),
        direct=weights.direct,
    )
    return gated_norm(y, gates, None, len(weights.direct), eps=0.0)
