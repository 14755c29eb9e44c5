"""Layers that scan a state of each head: Mamba 1 and 2, and the gated delta rule.

Dimension letters: as in `kernels.mamba1`, `kernels.mamba2` and `kernels.gated_delta`; D width of the
convolution.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kernels.gated_delta import GatedDeltaWeights, gated_delta
from kernels.mamba1 import Mamba1Weights, mamba1
from kernels.mamba2 import Mamba2Weights, mamba2
from kernels.rms_norm import rms_norm
from kernels.short_conv import silu_conv
from workers.kv.state_tensors import StateShape
from workers.models.layers import ForwardContext
from workers.models.recurrent_mixer import RecurrentMixer
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba1Config, Mamba2Config

# What the names of parameters of decays begin with in Kimi Linear.
FORGET = "forget_gate."


class Scan(RecurrentMixer):
    """A convolution, and a state of each head, which is float32."""

    # What the names of parameters of decays begin with, and that of the norm.
    _decays = _norm = ""

    def __init__(
        self,
        place: str,
        config: Mamba1Config | Mamba2Config | GatedDeltaConfig,
        *,
        eps: float,
        **parts: Any,
    ) -> None:
        """As `RecurrentMixer`, which takes the `parts`; `eps`: of norms."""
        super().__init__(place, **parts)
        self._config, self._eps = config, eps

    @property
    @abstractmethod
    def weights(self) -> Mamba1Weights | Mamba2Weights | GatedDeltaWeights:
        """The filled parameters, as the kernels read them."""

    @property
    @abstractmethod
    def _head_state(self) -> tuple[int, int]:
        """The shape of the state of a head."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence: the last inputs of the convolution, and the state of each head."""
        sizes, dtype = self._config, self._convolutions[0].dtype
        return (
            StateShape((sizes.taps - 1, sizes.convolved), dtype),
            StateShape((sizes.heads, *self._head_state), torch.float32),
        )

    @property
    def _convolutions(self) -> Sequence[torch.Tensor]:
        """The weights of those that are one after the other: [D, 1, L] in all."""
        return (self.parameters["conv1d.weight"],)

    @cached_property
    def _taps(self) -> torch.Tensor:
        """[L, D]."""
        return torch.cat([*self._convolutions])[:, 0].t().contiguous()

    def _shared_weights(self) -> dict[str, Any]:
        """What Mamba 2 and the gated delta rule have."""
        named = self.parameters
        return {
            "taps": self._taps,
            "dt_bias": named[f"{self._decays}dt_bias"].float(),
            "decays": -torch.exp(named[f"{self._decays}A_log"].float()).flatten(),
            "norm": named.get(f"{self._norm}norm.weight"),
            "eps": self._eps,
        }


class Mamba1(Scan):
    """Mamba 1 with norms of steps, B and C.

    Its parameters: conv1d.weight [I, 1, L], conv1d.bias [I] if there is one, dt_proj.bias and D [I], A_log
    [I, N], and the weights of norms. Rows of 2 * I become I.
    """

    _config: Mamba1Config

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.state_width, self._config.head_width

    @cached_property
    def weights(self) -> Mamba1Weights:
        """See `Scan`."""
        decays = -torch.exp(self.parameters["A_log"].float())  # [I, N]
        return Mamba1Weights(
            dt_bias=self.parameters["dt_proj.bias"].float(),
            decays=decays.view(-1, self._config.head_width, decays.shape[1]).transpose(1, 2).contiguous(),
            direct=self.parameters["D"].float(),
        )

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """See `RecurrentMixer`."""
        assert context.states is not None
        slots, invariant = context.lora_slots, context.batch_invariant
        raw, gates = projected.chunk(2, dim=1)  # [T, I] each
        x = silu_conv(raw, self._taps, self.parameters.get("conv1d.bias"), states[0], context.states)
        sizes = [self._config.rank, *[self._config.state_width] * 2]
        parts = torch.split(self.within["x_proj"](x, slots, batch_invariant=invariant), sizes, dim=1)
        steps, *others = (
            rms_norm(part.contiguous(), self.parameters[f"{name}_layernorm.weight"], self._eps)
            for name, part in zip(("dt", "b", "c"), parts, strict=True)
        )
        steps = self.within["dt_proj"](steps, slots, batch_invariant=invariant)  # [T, I]
        rows = torch.cat((x, steps, gates, *others), dim=1)
        return mamba1(rows, self.weights, states[1], context.states)


class Mamba2(Scan):
    """Mamba 2.

    Its parameters: conv1d.weight [D, 1, L], conv1d.bias [D] if there is one, dt_bias, A_log and D [H], and
    norm.weight [I] if there is one. Rows of I + D + H become I.
    """

    _config: Mamba2Config

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.state_width, self._config.head_width

    @cached_property
    def weights(self) -> Mamba2Weights:
        """See `Scan`."""
        return Mamba2Weights(
            bias=self.parameters.get("conv1d.bias"),
            direct=self.parameters["D"].float(),
            groups=self._config.groups,
            state_width=self._config.state_width,
            least_step=self._config.least_step,
            **self._shared_weights(),
        )

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """See `RecurrentMixer`."""
        assert context.states is not None
        return mamba2(projected, self.weights, states[0], states[1], context.states)


class GatedDelta(Scan):
    """The gated delta rule.

    Its parameters: conv1d.weight [D, 1, L], dt_bias and A_log [H], and norm.weight [V]. Rows of I + D + 2 * H
    become I.
    """

    _config: GatedDeltaConfig

    @property
    def _head_state(self) -> tuple[int, int]:
        return self._config.key_width, self._config.head_width

    @cached_property
    def weights(self) -> GatedDeltaWeights:
        """See `Scan`."""
        sizes = self._config
        return GatedDeltaWeights(
            key_heads=sizes.key_heads,
            key_width=sizes.key_width,
            adjacent=1 if sizes.tiled else sizes.heads // sizes.key_heads,
            **self._shared_weights(),
        )

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """See `RecurrentMixer`."""
        assert context.states is not None
        return gated_delta(projected, self.weights, states[0], states[1], context.states)


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay of each element of a key, and gates of few inputs.

    Its parameters: q_conv1d.weight, k_conv1d.weight and v_conv1d.weight [I, 1, L], dt_bias [I], A_log
    [1, 1, H, 1], and o_norm.weight [V]. Rows of 3 * I + 2 * V + H become I.
    """

    _decays, _norm = FORGET, "o_"

    @property
    def _convolutions(self) -> Sequence[torch.Tensor]:
        return [self.parameters[f"{name}_conv1d.weight"] for name in "qkv"]

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """See `RecurrentMixer`."""
        sizes, slots, invariant = self._config, context.lora_slots, context.batch_invariant
        widths = [sizes.convolved, *[sizes.head_width] * 2, sizes.heads]
        qkv, *narrow, betas = torch.split(projected, widths, dim=1)
        steps, gates = (
            self.within[name](part.contiguous(), slots, batch_invariant=invariant)
            for name, part in zip((f"{FORGET}f_b_proj", "g_b_proj"), narrow, strict=True)
        )
        return super().mix(torch.cat((gates, qkv, betas, steps), dim=1), states, context)
