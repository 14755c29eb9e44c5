"""Layers that scan a state of each head: Mamba 2, and the gated delta rule.

Dimension letters: as in `kernels.mamba2` and `kernels.gated_delta`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from kernels.gated_delta import GatedDeltaWeights, gated_delta
from kernels.mamba2 import Mamba2Weights, mamba2
from kernels.state_rows import StateRows
from workers.kv.state_tensors import StateShape
from workers.models.linear import Linear
from workers.models.recurrent_mixer import RecurrentMixer
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba2Config


class Scan(RecurrentMixer):
    """A convolution, and a state of each head, which is float32."""

    def __init__(
        self,
        place: str,
        config: Mamba2Config | GatedDeltaConfig,
        *,
        into: Linear,
        output: Linear,
        parameters: Mapping[str, torch.Tensor],
        eps: float,
        is_last: bool,
    ) -> None:
        """As `RecurrentMixer`; `eps`: of the norm."""
        super().__init__(place, into=into, output=output, parameters=parameters, is_last=is_last)
        self._config, self._eps = config, eps

    @property
    @abstractmethod
    def weights(self) -> Mamba2Weights | GatedDeltaWeights:
        """The filled parameters, as the kernels read them."""

    @property
    @abstractmethod
    def _head_state(self) -> tuple[int, int]:
        """The shape of the state of a head."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence: the last inputs of the convolution, and the state of each head."""
        sizes, dtype = self._config, self.parameters["conv1d.weight"].dtype
        return (
            StateShape((sizes.taps - 1, sizes.convolved), dtype),
            StateShape((sizes.heads, *self._head_state), torch.float32),
        )

    def _shared_weights(self) -> dict[str, Any]:
        """What both kinds have."""
        named = self.parameters
        return {
            "taps": named["conv1d.weight"][:, 0].t().contiguous(),
            "dt_bias": named["dt_bias"].float(),
            "decays": -torch.exp(named["A_log"].float()),
            "norm": named.get("norm.weight"),
            "eps": self._eps,
        }


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

    def mix(self, projected: torch.Tensor, states: list[torch.Tensor], at: StateRows) -> torch.Tensor:
        """See `RecurrentMixer`."""
        return mamba2(projected, self.weights, states[0], states[1], at)


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

    def mix(self, projected: torch.Tensor, states: list[torch.Tensor], at: StateRows) -> torch.Tensor:
        """See `RecurrentMixer`."""
        return gated_delta(projected, self.weights, states[0], states[1], at)
