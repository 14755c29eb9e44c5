"""A mixture of experts: a router chooses a few MLPs for each token.

Dimension letters: T tokens; C hidden width; D width of the experts' inputs, which is C in most models; I
intermediate width of an expert; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.cpu.experts import PackedWeights, expert_layer
from kernels.cpu.routing import CompiledRule
from kernels.cpu.sublayers import Mixture
from kernels.expert_lora import ExpertAdapters
from kernels.experts import ExpertWeights, experts, matrix_of, pack_experts, route
from kernels.gated_activation import ACTIVATIONS, sigmoid
from kernels.linear import DenseWeight
from kernels.lora import RowSlots
from kernels.lora_pairs import SortedRows
from kernels.weight import Weight
from workers.models.config import ModelConfig
from workers.models.layers import Body, ForwardContext, GatedMlp, Several
from workers.models.linear import Linear, LoadTarget
from workers.models.lora import ExpertProjection, Projection
from workers.models.shard import Slice


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """The biases of a layer, uninitialised until its targets are filled.

    Attributes:
        router: [E].
        gate_up: [E, 2 * I].
        down: [E, C].
        has_down: Whether `down` is filled. If not, it is 0 here, because another rank adds it.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    has_down: bool

    def __post_init__(self) -> None:
        if not self.has_down:
            self.down.zero_()


class Experts(Body):
    """The sum of the chosen experts' outputs, weighted by the router.

    Attributes:
        index: The number of the layer among the layers with experts.
        per_token: The number of experts chosen for a token.
    """

    def __init__(  # noqa: PLR0913 - the parts of a layer
        self,
        config: ModelConfig,
        part: range,
        index: int,
        *,
        router: Weight,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        biases: ExpertBiases | None = None,
        correction: torch.Tensor | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        """Take ownership of parameters.

        Args:
            config: The model.
            part: This rank's part of each expert's intermediate width.
            index: The number of the layer among the layers with experts.
            router: [E, C].
            gate_up: [E, 2 * I, D], rows of gate, then up; I: the width of `part`. Without gates [E, I, D].
            down: [E, D, I].
            biases: None: there are none.
            correction: [E] float32, see `kernels.experts.route`; None: there is none.
            latent: Projections [D, C] and [C, D] before and after the experts; None: D is C.
        """
        self._correction, self._latent = correction, latent
        self.gate_up = gate_up
        self.down = down
        self._biases = biases
        assert config.experts is not None and config.family.experts is not None
        self._config = config.experts
        self._names = config.family.experts
        self._activation = config.activation
        self._wide_routing = config.family.wide_routing
        self.index, self.per_token = index, config.experts.per_token
        self._part = part
        size, width = self._config.intermediate_size, matrix_of(down, 0).shape[0]
        self._rows = Slice((size, width), (part,), range(width))
        self._columns = Slice((width, size), (range(width),), part)
        names, count, interleaved = self._names, self._config.count, self._names.interleaved
        self.router = Linear(
            {names.router: Slice.whole(*router.shape)},
            router,
            None if biases is None else biases.router,
            parameter=f"{names.module.removesuffix('experts')}{names.router.partition('.')[2]}.weight",
        )
        into, out_of = ({names.gate: self._rows, names.up: self._rows}, {names.down: self._columns})
        self._into = ExpertProjection(
            f"{names.module}.gate_up_proj", into, count, width, interleaved=interleaved
        )
        self._out_of = ExpertProjection(
            f"{names.module}.down_proj", out_of, count, len(part), interleaved=interleaved
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        yield from self.router.targets(prefix)
        for projection in self._latent or ():
            yield from projection.targets(prefix)
        for index in range(self._config.count):
            both = matrix_of(self.gate_up, index), matrix_of(self.down, index)
            yield from self._targets_of(index, ".weight", *both, self._columns, prefix)
            if self._biases is not None:
                whole = Slice.whole(*self._columns.shape) if self._biases.has_down else None
                both = DenseWeight(self._biases.gate_up[index]), DenseWeight(self._biases.down[index])
                yield from self._targets_of(index, ".bias", *both, whole, prefix)
        if self._correction is not None:
            name = f"{prefix}{self._names.correction}"
            yield name, LoadTarget(DenseWeight(self._correction), tuple(self._correction.shape))

    def _targets_of(
        self, expert: int, kind: str, gate_up: Weight, down: Weight, of_down: Slice | None, prefix: str
    ) -> Iterator[tuple[str, LoadTarget]]:
        """The targets of an expert's matrices or biases. `of_down`: this rank's part of down, if any."""
        names = self._names
        for name, matrix, first, taken in (
            (names.gate, gate_up, 0, self._rows),
            (names.up, gate_up, len(self._part) if names.gate else 0, self._rows),
            (names.down, down, 0, of_down),
        ):
            if name and taken is not None:
                into, at = matrix.part(first)
                shape = taken.shape if kind == ".weight" else taken.shape[:1]
                yield f"{prefix}{name.format(expert)}{kind}", LoadTarget(into, shape, taken=taken, first=at)

    def projections(self) -> Iterator[tuple[str, Projection]]:
        """See `Body`. There are no kernels for adapters of experts without gates, and none on a GPU."""
        if self.router.weight.device.type == "cpu":
            yield "", self.router
            if self._names.gate:
                yield "", self._into
                yield "", self._out_of
        for projection in self._latent or ():
            yield "", projection

    def pack(self) -> None:
        self.router.pack()
        self.gate_up = pack_experts(self.gate_up)
        self.down = pack_experts(self.down)
        for projection in self._latent or ():
            projection.pack()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return matrix_of(self.down, 0).dtype

    @property
    def can_compile(self) -> bool:
        """Whether there are compiled kernels for all of its parts."""
        is_packed = isinstance(self.gate_up, PackedWeights) and isinstance(self.down, PackedWeights)
        return is_packed and self.router.weight.compiled is not None and self._latent is None

    def compiled(self) -> Mixture:
        """The description for compiled sublayers, except the router. Keeps nothing alive."""
        assert isinstance(self.gate_up, PackedWeights) and isinstance(self.down, PackedWeights)
        config, biases = self._config, self._biases
        into, out_of = self._into.lora, self._out_of.lora
        layer = expert_layer(
            self.gate_up,
            self.down,
            ACTIVATIONS.index(self._activation),
            None if biases is None else (biases.gate_up, biases.down),
            None if into is None or out_of is None else (into, out_of),
        )
        rule = CompiledRule.of(
            config.routing, config.count, config.per_token, config.normalized, self._correction
        )
        wide_router = self.router.weight.dtype is not self.dtype
        return Mixture(layer, rule, wide_router, self._wide_routing)

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        dtype = torch.float32 if self._wide_routing else x.dtype
        biases, slots, invariant = self._biases, context.lora_slots, context.batch_invariant
        rows = x.to(self.router.weight.dtype)
        logits = self.router(rows, slots, batch_invariant=invariant)  # [T, E]
        routing = context.routing
        given = None if routing is None else routing.given_of(self.index)
        count, normalized, rule = self._config.per_token, self._config.normalized, self._config.routing
        expert_ids, weights = route(logits, count, normalized, dtype, given, rule, self._correction)
        if routing is not None:
            routing.note(expert_ids)
        if self._latent is not None:
            x = self._latent[0](x, slots, batch_invariant=invariant)  # [T, D]
        result = experts(
            x,
            self.gate_up,
            self.down,
            expert_ids,
            weights,
            self._activation,
            biases=None if biases is None else (biases.gate_up, biases.down),
            batch_invariant=invariant,
            lora=None if slots is None else self._adapters(slots),
        )
        return result if self._latent is None else self._latent[1](result, slots, batch_invariant=invariant)

    def _adapters(self, slots: RowSlots) -> ExpertAdapters | None:
        into, out_of = self._into.lora, self._out_of.lora
        if isinstance(slots, SortedRows) or into is None or out_of is None:
            return None
        return ExpertAdapters(into, out_of, slots)


class WithSharedExpert(Several):
    """experts(x) + sigmoid(gate(x)) * shared(x), or without the gate.

    Attributes:
        gate: [1, C]; None: there is none.
    """

    def __init__(self, experts: Experts, shared: GatedMlp, gate: Weight | None, gate_name: str) -> None:
        """Take ownership of the parts. `gate`: [1, C], or None; `gate_name`: in a layer of a checkpoint."""
        super().__init__(shared, experts)
        self._experts, self._shared = experts, shared
        self.gate = None if gate is None else Linear({gate_name: Slice.whole(*gate.shape)}, gate, None)

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        yield from super().targets(prefix)
        if self.gate is not None:
            yield from self.gate.targets(prefix)

    def projections(self) -> Iterator[tuple[str, Projection]]:
        yield from super().projections()
        if self.gate is not None and self.gate.weight.device.type == "cpu":
            yield "", self.gate

    def pack(self) -> None:
        super().pack()
        if self.gate is not None:
            self.gate.pack()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        shared = self._shared(x, context)
        if self.gate is not None:
            gate = self.gate(x, context.lora_slots, batch_invariant=context.batch_invariant)  # [T, 1]
            shared *= sigmoid(gate)
        return self._experts(x, context).add_(shared)
