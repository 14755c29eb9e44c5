"""The gated delta rule between its projections: convolution, scan of a state, norm and gate.

A row of projections has gates z, the inputs of a convolution, and b and a for each value head. The
convolution and silu make queries q and keys k of each key head, which are divided by their lengths, and
values v of each value head. Of each value head, with the q and k of its key head and a state S [K, V]:

    S = exp(decays * softplus(a + dt_bias)) * S
    S = S + outer(k, sigmoid(b) * (v - k @ S)),  y = q @ S / sqrt(K)
    out = norm(y) * silu(z), of each head

With decays of each element of a key (Kimi Linear) there is an a for each of them, and z has a sigmoid.

Source: "Gated Delta Networks" (arXiv 2412.06464), and `Qwen3NextGatedDeltaNet` in the transformers library.
Tokens are scanned one after the other, so that bits do not depend on chunks.

Dimension letters: T rows; J key heads; K width of a key; H value heads; V width of a value; I = H * V;
D = 2 * J * K + I; L taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.cpu import state_scan as cpu
from kernels.cpu.dtypes import can_run
from kernels.short_conv import silu_conv, silu_conv_reference
from kernels.state_rows import StateRows, scanned_rows

# Added to the sum of squares of a query or key.
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """The parameters.

    Attributes:
        taps: [L, D], of the convolution, in the dtype of rows.
        dt_bias: [H] float32; with decays of each element [H * K], and then J = H.
        decays: [H] float32, negative.
        norm: [V], in the dtype of rows.
        key_heads: J.
        key_width: K.
        adjacent: How many value heads of a key head are one after the other: H / J, or 1, where the first
            value heads of all key heads come before all second ones.
        eps: Of the norm.
    """

    taps: torch.Tensor
    dt_bias: torch.Tensor
    decays: torch.Tensor
    norm: torch.Tensor
    key_heads: int
    key_width: int
    adjacent: int
    eps: float

    @property
    def is_wide(self) -> bool:
        """Whether each element of a key has a decay of its own."""
        return len(self.dt_bias) > len(self.decays)

    @property
    def keys(self) -> int:
        """J * K."""
        return self.key_heads * self.key_width

    @property
    def widths(self) -> list[int]:
        """The parts of a row of projections: gates, inputs of the convolution, betas and steps."""
        inner = len(self.decays) * len(self.norm)
        return [inner, 2 * self.keys + inner, len(self.decays), len(self.dt_bias)]

    def compiled(self) -> cpu.GatedDeltaWeights:
        """The arguments of the CPU's kernels, valid as long as these tensors exist."""
        tensors = (self.taps, self.dt_bias, self.decays, self.norm)
        return cpu.GatedDeltaWeights(
            *(each.data_ptr() for each in tensors),
            *(
                self.key_heads,
                self.key_width,
                len(self.decays),
                len(self.norm),
                len(self.taps),
                self.adjacent,
                self.is_wide,
            ),
            self.eps,
        )


def gated_delta(
    projected: torch.Tensor,
    weights: GatedDeltaWeights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """Run the rows of a batch. Mutates `inputs` and `states`: writes those that are kept.

    Args:
        projected: [T, I + D + 2 * H] contiguous; with decays of each element [T, I + D + H + H * K].
        weights: The parameters.
        inputs: [slots, L - 1, D], the last inputs of the convolution.
        states: [slots, H, K, V] float32.
        at: Which states the rows follow.

    Returns:
        [T, I]
    """
    if projected.is_cuda:
        return _on_gpu(projected, weights, inputs, states, at)
    if can_run(projected):
        return cpu.scan(projected, weights.compiled(), inputs, states, at)
    return gated_delta_reference(projected, weights, inputs, states, at)


def gated_delta_reference(
    projected: torch.Tensor,
    weights: GatedDeltaWeights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """See `gated_delta`. In torch, of any device and dtype."""
    heads, width, keys = len(weights.decays), len(weights.norm), weights.keys
    gates, raw, betas, steps = torch.split(projected, weights.widths, dim=1)
    convolved = silu_conv_reference(raw, weights.taps, None, inputs, at).float()
    rows = len(projected)
    key_heads = torch.arange(heads, device=projected.device) // weights.adjacent % weights.key_heads  # [H]
    query, key = (
        _unit(each.view(rows, weights.key_heads, -1))[:, key_heads]
        for each in (convolved[:, :keys], convolved[:, keys : 2 * keys])
    )  # [T, H, K]
    query = query * weights.key_width**-0.5
    value = convolved[:, 2 * keys :].view(rows, heads, width)  # [T, H, V]
    beta = torch.sigmoid(betas.float())
    steps = functional.softplus(steps.float() + weights.dt_bias).view(rows, heads, -1)
    decay = torch.exp(steps * weights.decays[:, None])  # [T, H, K], or [T, H, 1]
    y = torch.empty_like(value)
    for row, state in scanned_rows(states, at):  # [H, K, V]
        state.mul_(decay[row][:, :, None])
        held = (key[row][:, None] @ state)[:, 0]  # [H, V]
        change = (value[row] - held) * beta[row][:, None]
        state.add_(key[row][:, :, None] * change[:, None])
        y[row] = (query[row][:, None] @ state)[:, 0]
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm.float()
    opened = torch.sigmoid(gates.float()) if weights.is_wide else functional.silu(gates.float())
    out: torch.Tensor = normed.flatten(1) * opened
    return out.to(projected.dtype)


def _on_gpu(
    projected: torch.Tensor,
    weights: GatedDeltaWeights,
    inputs: torch.Tensor,
    states: torch.Tensor,
    at: StateRows,
) -> torch.Tensor:
    """See `gated_delta`. In three launches."""
    from kernels.cuda.gated_norm import gated_norm
    from kernels.cuda.state_scan import Heads, state_scan

    heads, width = len(weights.decays), len(weights.norm)
    gates, raw, betas, steps = torch.split(projected, weights.widths, dim=1)
    convolved = silu_conv(raw, weights.taps, None, inputs, at)
    queries, keys, values = torch.split(convolved, [weights.keys, weights.keys, heads * width], dim=1)
    y = state_scan(
        *((queries, keys, values), steps, weights.dt_bias, weights.decays, states, at),
        Heads(heads, weights.key_heads, weights.adjacent),
        betas=betas,
    )
    return gated_norm(y, gates, weights.norm, width, weights.eps, norm_first=True, is_sigmoid=weights.is_wide)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Each divided by its length."""
    return vectors * torch.rsqrt(vectors.pow(2).sum(-1, keepdim=True) + _EPS)
