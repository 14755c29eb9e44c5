"""A layer with a short convolution. Dimension letters: C hidden width; L taps."""

from __future__ import annotations

from functools import cached_property

import torch

from kernels.short_conv import short_conv
from workers.kv.state_tensors import StateShape
from workers.models.layers import ForwardContext
from workers.models.recurrent_mixer import RecurrentMixer


class ShortConv(RecurrentMixer):
    """Its parameters: conv.weight [C, 1, L], and conv.bias [C] if there is one. Rows of 3 * C become C."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence: the last gated inputs."""
        weight = self.parameters["conv.weight"]
        width, _, length = weight.shape
        return (StateShape((length - 1, width), weight.dtype),)

    @cached_property
    def taps(self) -> torch.Tensor:
        """The filled weight [L, C], as the kernels read it."""
        return self.parameters["conv.weight"][:, 0].t().contiguous()

    @property
    def bias(self) -> torch.Tensor | None:
        """[C], or None."""
        return self.parameters.get("conv.bias")

    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """See `RecurrentMixer`."""
        assert context.states is not None
        return short_conv(projected, self.taps, self.bias, states[0], context.states)
