"""A layer with a recurrent state in place of attention.

Dimension letters: T tokens of the batch; C hidden width; P and I the widths of projected rows; R wanted rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from kernels.linear import DenseWeight
from workers.kv.state_tensors import StateShape
from workers.models.layers import ForwardContext
from workers.models.linear import Linear, LoadTarget


class RecurrentMixer(ABC):
    """out(mix(into(x))), where `mix` goes on from a state.

    Attributes:
        states: Which tensors of the state are its own. The decoder says it.
        is_last: No layer after this reads other rows, so only the wanted rows are returned.
    """

    def __init__(
        self,
        place: str,
        *,
        into: Linear,
        output: Linear,
        parameters: Mapping[str, torch.Tensor],
        within: Mapping[str, Linear],
        is_last: bool,
    ) -> None:
        """Take ownership of parameters.

        Args:
            place: What the names of all begin with in a layer of a checkpoint.
            into: [P, C].
            output: [C, I].
            parameters: The others, in the shapes and under the names of a checkpoint, without `place`.
            within: Projections that `mix` needs, by their names in a checkpoint.
            is_last: See the attribute.
        """
        self.states, self.is_last = range(0), is_last
        self.into = into
        self.output = output
        self.parameters, self.within = parameters, within
        self._place = place

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What is kept of a sequence."""

    @abstractmethod
    def mix(
        self, projected: torch.Tensor, states: list[torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """[T, P] -> [T, I]. Mutates `states`, which have these shapes for each slot: writes what is kept."""

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        for name, projection in self.projections():
            yield from projection.targets(prefix + name)
        for name, tensor in self.parameters.items():
            yield f"{prefix}{self._place}{name}", LoadTarget(DenseWeight(tensor), tuple(tensor.shape))

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """See `Body`."""
        yield self._place, self.into
        for projection in self.within.values():
            yield self._place, projection
        yield self._place, self.output

    def pack(self) -> None:
        """Pack the filled weights for the matrix library."""
        for _, projection in self.projections():
            projection.pack()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C]; in the last layer only the wanted rows. Writes the states that are kept."""
        lora_slots, invariant = context.lora_slots, context.batch_invariant
        projected = self.into(x, lora_slots, batch_invariant=invariant)
        assert context.kv.states is not None
        states = [context.kv.states.tensors[index] for index in self.states]
        mixed = self.mix(projected, states, context)
        if self.is_last:
            mixed, lora_slots = mixed.index_select(0, context.inputs.wanted_rows), context.wanted_lora_slots
        return self.output(mixed, lora_slots, batch_invariant=invariant)
