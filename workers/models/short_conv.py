"""A layer with a short convolution in place of attention.

Dimension letters: T tokens of the batch; C hidden width; L taps; R wanted rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.linear import DenseWeight
from kernels.short_conv import short_conv
from workers.kv.state_tensors import StateShape
from workers.models.layers import ForwardContext
from workers.models.linear import Linear, LoadTarget


class ShortConv:
    """out(short_conv(into(x))), which goes on from a state.

    Attributes:
        states: Which tensors of the state are its own. The decoder says it.
        taps: [L, C]; see `kernels.short_conv`.
        is_last: This is the last layer, so only the wanted rows are returned.
    """

    def __init__(
        self,
        *,
        into: Linear,
        output: Linear,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_last: bool,
    ) -> None:
        """Take ownership of parameters.

        Args:
            into: [3 * C, C].
            output: [C, C].
            weight: [C, 1, L], as a checkpoint has it.
            bias: [C], or None.
            is_last: This is the last layer.
        """
        self.states, self.is_last = range(0), is_last
        self.into = into
        self.output = output
        self.bias = bias
        self._weight = weight
        self.taps = weight[:, 0].t()

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence: the last gated inputs."""
        length, width = self.taps.shape
        return (StateShape((length - 1, width), self._weight.dtype),)

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        for name, projection in self.projections():
            yield from projection.targets(prefix + name)
        yield f"{prefix}conv.conv.weight", LoadTarget(DenseWeight(self._weight), tuple(self._weight.shape))
        if self.bias is not None:
            yield f"{prefix}conv.conv.bias", LoadTarget(DenseWeight(self.bias), tuple(self.bias.shape))

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """See `Body`."""
        yield "conv.", self.into
        yield "conv.", self.output

    def pack(self) -> None:
        """Pack the filled weights for the matrix library."""
        self.into.pack()
        self.output.pack()
        self.taps = self.taps.contiguous()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C]; in the last layer only the wanted rows. Writes the states that are kept."""
        lora_slots, invariant = context.lora_slots, context.batch_invariant
        projected = self.into(x, lora_slots, batch_invariant=invariant)  # [T, 3 * C]
        assert context.kv.states is not None and context.states is not None
        inputs = context.kv.states.tensors[self.states.start]
        mixed = short_conv(projected, self.taps, self.bias, inputs, context.states)  # [T, C]
        if self.is_last:
            mixed, lora_slots = mixed.index_select(0, context.inputs.wanted_rows), context.wanted_lora_slots
        return self.output(mixed, lora_slots, batch_invariant=invariant)
