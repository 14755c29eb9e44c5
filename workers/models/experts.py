"""A mixture of experts: a router chooses a few gated MLPs for each token.

Dimension letters: T tokens; C hidden width; I intermediate width of an expert; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.experts import ExpertWeights, experts, matrix_of, pack_experts, route
from kernels.linear import linear
from kernels.weight import Weight
from workers.models.config import ModelConfig
from workers.models.layers import ForwardContext
from workers.models.linear import Linear, LoadTarget
from workers.models.shard import Slice


class Experts:
    """The sum of the chosen experts' outputs, weighted by the router."""

    def __init__(
        self,
        config: ModelConfig,
        part: range,
        index: int,
        *,
        router: Weight,
        gate_up: ExpertWeights,
        down: ExpertWeights,
    ) -> None:
        """Take ownership of parameters.

        Args:
            config: The model.
            part: The part of each expert's intermediate width that this rank has.
            index: The number of the layer among those with experts.
            router: [E, C].
            gate_up: [E, 2 * I, C], rows of gate, then up; I: the width of `part`.
            down: [E, C, I].
        """
        self.router = router
        self.gate_up = gate_up
        self.down = down
        assert config.experts is not None and config.family.experts is not None
        self._config = config.experts
        self._names = config.family.experts
        self._activation = config.activation
        self._wide_routing = config.family.wide_routing
        self._index = index
        self._part = part

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        whole = Slice.whole(*self.router.shape)
        yield f"{prefix}{self._names.router}.weight", LoadTarget(self.router, whole.shape, taken=whole)
        size, width = self._config.intermediate_size, self.router.shape[1]
        rows = Slice((size, width), (self._part,), range(width))
        columns = Slice((width, size), (range(width),), self._part)
        names = self._names
        for index in range(self._config.count):
            gate_up, down = matrix_of(self.gate_up, index), matrix_of(self.down, index)
            for name, matrix, first, taken in (
                (names.gate, gate_up, 0, rows),
                (names.up, gate_up, len(self._part), rows),
                (names.down, down, 0, columns),
            ):
                into, at = matrix.part(first)
                target = LoadTarget(into, taken.shape, taken=taken, first=at)
                yield f"{prefix}{name.format(index)}.weight", target

    def projections(self) -> Iterator[tuple[str, Linear]]:
        """None: experts take no adapters."""
        yield from ()

    def pack(self) -> None:
        """Pack the filled weights in place."""
        self.router = self.router.packed()
        self.gate_up = pack_experts(self.gate_up)
        self.down = pack_experts(self.down)

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        dtype = torch.float32 if self._wide_routing else x.dtype
        logits = linear(x, self.router, batch_invariant=context.batch_invariant)  # [T, E]
        routing = context.routing
        given = None if routing is None else routing.given_of(self._index)
        expert_ids, weights = route(logits, self._config.per_token, self._config.normalized, dtype, given)
        if routing is not None:
            routing.note(expert_ids)
        return experts(
            x,
            self.gate_up,
            self.down,
            expert_ids,
            weights,
            self._activation,
            batch_invariant=context.batch_invariant,
        )
