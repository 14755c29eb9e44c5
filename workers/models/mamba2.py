"""A layer with Mamba 2 in place of attention.

Dimension letters: as in `kernels.mamba2`; C hidden width; R wanted rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernels.linear import DenseWeight
from kernels.mamba2 import Mamba2Weights, mamba2
from workers.kv.state_tensors import StateShape
from workers.models.layer_settings import Mamba2Config
from workers.models.layers import ForwardContext
from workers.models.linear import Linear, LoadTarget


class Mamba2:
    """out(mamba2(into(x))), which goes on from a state.

    Attributes:
        states: Which tensors of the state are its own: of the convolution, and of heads. The decoder says it.
        is_last: This is the last layer, so only the wanted rows are returned.
    """

    def __init__(
        self,
        config: Mamba2Config,
        *,
        into: Linear,
        output: Linear,
        parameters: Mapping[str, torch.Tensor],
        eps: float,
        is_last: bool,
    ) -> None:
        """Take ownership of parameters.

        Args:
            config: The sizes.
            into: [I + D + H, C].
            output: [C, I].
            parameters: The others, in the shapes and under the names of a checkpoint:
                conv1d.weight [D, 1, L], conv1d.bias [D] if there is one,
                dt_bias, A_log and D [H], norm.weight [I].
            eps: Of the norm.
            is_last: This is the last layer.
        """
        self.config, self.states, self.is_last = config, range(0), is_last
        self.into = into
        self.output = output
        self._parameters, self._eps = parameters, eps
        self._weights: Mamba2Weights | None = None

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence: the last inputs of the convolution, and the state of each head."""
        sizes, dtype = self.config, self._parameters["conv1d.weight"].dtype
        return (
            StateShape((sizes.taps - 1, sizes.convolved), dtype),
            StateShape((sizes.heads, sizes.state_width, sizes.head_width), torch.float32),
        )

    @property
    def weights(self) -> Mamba2Weights:
        """The filled parameters, as the kernels read them."""
        if self._weights is None:
            named = self._parameters
            self._weights = Mamba2Weights(
                taps=named["conv1d.weight"][:, 0].t().contiguous(),
                bias=named.get("conv1d.bias"),
                dt_bias=named["dt_bias"].float(),
                decays=-torch.exp(named["A_log"].float()),
                direct=named["D"].float(),
                norm=named["norm.weight"],
                groups=self.config.groups,
                state_width=self.config.state_width,
                eps=self._eps,
            )
        return self._weights

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        for name, projection in self.projections():
            yield from projection.targets(prefix + name)
        for name, tensor in self._parameters.items():
            yield f"{prefix}mamba.{name}", LoadTarget(DenseWeight(tensor), tuple(tensor.shape))

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """See `Body`."""
        yield "mamba.", self.into
        yield "mamba.", self.output

    def pack(self) -> None:
        """Pack the filled weights for the matrix library."""
        self.into.pack()
        self.output.pack()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C]; in the last layer only the wanted rows. Writes the states that are kept."""
        lora_slots, invariant = context.lora_slots, context.batch_invariant
        projected = self.into(x, lora_slots, batch_invariant=invariant)  # [T, I + D + H]
        assert context.kv.states is not None and context.states is not None
        inputs, states = (context.kv.states.tensors[index] for index in self.states)
        mixed = mamba2(projected, self.weights, inputs, states, context.states)  # [T, I]
        if self.is_last:
            mixed, lora_slots = mixed.index_select(0, context.inputs.wanted_rows), context.wanted_lora_slots
        return self.output(mixed, lora_slots, batch_invariant=invariant)
