"""The parts of decoder layers: norms, attention over paged KV, and gated MLPs.

A sublayer reads the residual stream and adds to it. Sublayers pass on two tensors: x, the output of the last
one, and the residual stream without it. So the addition and the following norm are one operation.

Dimension letters: T tokens of the batch; C hidden width; H query heads; K key-value heads; D head width;
R rotated elements of a head, or wanted rows; I intermediate width.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

from kernels.gated_activation import Activation, gated_activation, sigmoid
from kernels.linear import DenseWeight
from kernels.lora import RowSlots
from kernels.paged_attention import paged_attention, paged_attention_without_first
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from kernels.rope import RopeSpec
from kernels.rope_kv_write import rope_kv_write
from kernels.state_rows import StateRows
from workers.kv.tensors import KvTensors
from workers.models.capture import Routing
from workers.models.config import ModelConfig
from workers.models.inputs import ForwardInputs
from workers.models.linear import Linear, LoadTarget
from workers.models.lora import Projection
from workers.models.shard import Group, Shard, Slice, normalise_rows, row_norm_slices


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The data of a forward that all layers share.

    Attributes:
        inputs: The batch.
        kv: The pages.
        rotations: [T, R] float32 for each rotary embedding: cosines and sines at the positions of the tokens.
        batch_invariant: On a GPU, the bits of a row must not depend on the other rows.
        lora_slots: The adapter slots of the T rows; None: no row has an adapter.
        wanted_lora_slots: The adapter slots of the R wanted rows; None: no row has an adapter.
        routing: The given and the captured experts; None: neither.
        states: The recurrent states that the rows continue; None: the model has none.
    """

    inputs: ForwardInputs
    kv: KvTensors
    rotations: Mapping[RopeSpec, torch.Tensor]
    batch_invariant: bool
    lora_slots: RowSlots | None = None
    wanted_lora_slots: RowSlots | None = None
    routing: Routing | None = None
    states: StateRows | None = None


class Norm:
    """RMSNorm of rows."""

    def __init__(self, name: str, weight: torch.Tensor, eps: float, offset: float) -> None:
        """Take ownership of a weight [C]: the checkpoint's tensor `name` plus `offset`."""
        self.name = name
        self.weight = weight
        self.eps = eps
        self._offset = offset

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        whole = Slice.whole(len(self.weight))
        yield (
            f"{prefix}{self.name}.weight",
            LoadTarget(DenseWeight(self.weight), whole.shape[:1], self._offset, whole),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C], a new tensor."""
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Normalise x + residual. Mutates `residual`, which becomes the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Body(ABC):
    """The function between the norms of a sublayer."""

    @abstractmethod
    def projections(self) -> Iterator[tuple[str, Projection]]:
        """The projections that may have adapters, each with the prefix of its names in a checkpoint."""

    @abstractmethod
    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""

    @abstractmethod
    def pack(self) -> None:
        """Pack the filled weights in place."""

    def renew(self) -> None:
        """Recompute data derived from the weights, after these were changed in place."""
        _renew(self)

    @abstractmethod
    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        """[T, C] -> [T, C], or only the wanted rows of it."""


class Projected(Body):
    """output(between(into(x))): attention, a recurrent layer, or an MLP.

    Attributes:
        is_last: Whether no later layer reads other rows. Then only the wanted rows are returned.
    """

    def __init__(
        self,
        place: str,
        into: Linear,
        output: Linear,
        within: Iterable[Linear] = (),
        *,
        is_last: bool = False,
    ) -> None:
        """Take ownership of the projections.

        Args:
            place: The prefix of all their names in a layer of a checkpoint.
            into: The projection of the hidden states.
            output: The projection back to the hidden width.
            within: Projections that `between` uses.
            is_last: See the class.
        """
        self.place, self.is_last = place, is_last
        self.into, self.output = into, output
        self._every = (into, *within, output)

    @abstractmethod
    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The input of `output`, from the outputs of `into`. May be empty if `is_last` and none is wanted."""

    def projections(self) -> Iterator[tuple[str, Linear]]:
        for projection in self._every:
            yield self.place, projection

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        for projection in self._every:
            yield from projection.targets(prefix + self.place)

    def pack(self) -> None:
        for projection in self._every:
            projection.pack()

    def __call__(self, x: torch.Tensor, context: ForwardContext, /) -> torch.Tensor:
        slots, invariant = context.lora_slots, context.batch_invariant
        inner = self.between(self.into(x, slots, batch_invariant=invariant), context)
        if self.is_last:
            wanted = context.inputs.wanted_rows
            if not len(wanted):
                return x[:0]  # [0, C]: only keys, values or states had to be written
            inner, slots = inner.index_select(0, wanted), context.wanted_lora_slots
        return self.output(inner, slots, batch_invariant=invariant)


class Several(Body):
    """Bodies with the same input, whose outputs are added."""

    def __init__(self, *parts: Body) -> None:
        """Take ownership of the parts."""
        self.parts = parts

    def projections(self) -> Iterator[tuple[str, Projection]]:
        for part in self.parts:
            yield from part.projections()

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        for part in self.parts:
            yield from part.targets(prefix)

    def pack(self) -> None:
        for part in self.parts:
            part.pack()

    def renew(self) -> None:
        for part in self.parts:
            part.renew()


def parts_of(body: Body) -> tuple[Body, ...]:
    """The parts of a `Several` in order, or else the body itself."""
    return body.parts if isinstance(body, Several) else (body,)


class Sublayer:
    """residual + scale * after(body(before(residual))). A norm that is None is left out.

    In a group, the outputs of the ranks' bodies are summed.
    """

    def __init__(
        self, before: Norm | None, body: Body, after: Norm | None, scale: float, group: Group | None = None
    ) -> None:
        """Take ownership of the parts."""
        self.body = body
        self.before = before
        self.after = after
        self.scale = scale
        self.group = group

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The target of each tensor of a checkpoint, by name."""
        for part in (self.before, self.body, self.after):
            if part is not None:
                yield from part.targets(prefix)

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mutates `residual`: x is added to it.

        Args:
            x: [T, C], the output of the previous sublayer; None: it is in `residual`, or this is the first.
            residual: [T, C], the residual stream without x.
            context: The forward.

        Returns:
            The output of this sublayer, and the residual stream without it.
        """
        return self.leave(self.body(self.enter(x, residual), context)), residual

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the sublayer, from the output of the body."""
        if self.group is not None:
            x = self.group.sum(x)
        if self.after is not None:
            x = self.after(x)
        return x if self.scale == 1.0 else x * self.scale

    def enter(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """The input of the body. Mutates `residual`: x is added to it."""
        if x is None:
            return residual if self.before is None else self.before(residual)
        if self.before is None:
            return residual.add_(x)
        return self.before.of_sum(x, residual)


class Attention(Projected):
    """Grouped-query attention over the pages of one layer.

    Attributes:
        index: The number of the layer among those with keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        index: int,
        *,
        qkv: Linear,
        output: Linear,
        head_norm: torch.Tensor | None,
        row_norms: tuple[torch.Tensor, torch.Tensor] | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Take ownership of parameters.

        Args:
            config: The model.
            shard: The shard of it that these heads belong to.
            index: The number of the layer.
            qkv: [(H + 2 * K) * D, C], rows of q, then k, then v; before them [H * D, C], rows of the gates of
                the attention output, if the family has them.
            output: [C, H * D].
            head_norm: [H + K, D], the q weight for every query head, then the k weight for every key-value
                head; None: heads are not normalised.
            row_norms: [H * D] and [K * D], the weights for queries and keys; None: rows are not normalised.
            sinks: [H] float32, see `kernels.paged_attention`; None: there are none.
        """
        super().__init__(f"{config.family.attention}.", qkv, output, is_last=index == config.last_mixer)
        self.config, self.layer, self.shard = config, config.layers[index], shard
        self.index = sum(layer.attention for layer in config.layers[:index])
        self._is_mtp_head = index == config.num_hidden_layers
        self.head_norm = head_norm
        self.row_norms = row_norms
        self.sinks = sinks

    def targets(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        yield from super().targets(prefix)
        prefix += self.place
        offset = self.config.family.norm_offset
        names = [f"{prefix}{name}.weight" for name in self.config.family.qk_norm_names]
        if self.head_norm is not None:
            parts = torch.split(self.head_norm, [len(self.shard.heads), len(self.shard.kv_heads)])
            for name, part in zip(names, parts, strict=True):
                yield name, LoadTarget(DenseWeight(part), (self.config.head_dim,), offset)
        slices = row_norm_slices(self.shard, *(len(weight) for weight in self.row_norms or ()))
        for name, weight, taken in zip(names, self.row_norms or (), slices, strict=False):
            yield name, LoadTarget(DenseWeight(weight), taken.shape[:1], offset, taken)
        if self.sinks is not None:
            shape = (self.config.num_attention_heads, 1)
            taken = Slice(shape, (self.shard.heads,), range(1))
            yield f"{prefix}sinks", LoadTarget(DenseWeight(self.sinks), shape[:1], taken=taken)

    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Projected`: [T, H * D] from the outputs of `qkv`. Writes keys and values to their slots."""
        gates, projected = self._gates_apart(projected)
        query = self._write(projected, context)  # [T, H, D]
        if self.is_last and not len(context.inputs.wanted_rows):
            return projected  # only the keys and values were needed
        return self._attend(query, gates, context)

    def _gates_apart(self, projected: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Splits the gates [T, H * D], if there are any, from queries, keys and values."""
        if not self.config.family.gated_attention:
            return None, projected
        width = len(self.shard.heads) * self.config.head_dim
        return projected[:, :width], projected[:, width:]

    def _attend(
        self, query: torch.Tensor, gates: torch.Tensor | None, context: ForwardContext
    ) -> torch.Tensor:
        """[T, H, D] -> [T, H * D]. Queries are as wide as the pages."""
        attend = paged_attention_without_first if self._is_mtp_head else paged_attention
        attended = attend(
            query,
            *context.kv.layer(self.index),
            context.inputs.attention,
            scale=self.config.attention_scale,
            sliding_window=self.layer.window,
            softcap=self.config.attention_softcap,
            sinks=self.sinks,
            batch_invariant=context.batch_invariant,
        )
        attended = attended[:, :, : self.config.head_dim].flatten(1)
        return attended if gates is None else attended * sigmoid(gates)

    def _write(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns queries [T, H, D] from projected rows [T, (H + 2 * K) * D]. Writes keys and values.

        In wider pages, heads are padded with zeros, which change no score.
        """
        eps, rope = self.config.rms_norm_eps, self.layer.rope
        if self.row_norms is not None:
            sizes = [len(weight) for weight in self.row_norms]
            parts = torch.split(projected[:, : sum(sizes)], sizes, dim=1)  # [T, H * D], [T, K * D]
            normalise_rows([*zip(parts, self.row_norms, strict=True)], self.shard.group, eps)
        rotations = None if rope is None else context.rotations[rope]
        k_pages, v_pages = context.kv.layer(self.index)
        head_norm, missing = self.head_norm, k_pages.shape[3] - self.config.head_dim
        if missing:
            heads = projected.reshape(len(projected), -1, self.config.head_dim)  # [T, H + 2 * K, D]
            if head_norm is not None:
                normed = rms_norm_reference(heads[:, : len(head_norm)], head_norm, eps)
                heads, head_norm = torch.cat([normed, heads[:, len(head_norm) :]], dim=1), None
            projected = functional.pad(heads, (0, missing)).flatten(1)
        return rope_kv_write(projected, head_norm, rotations, context.inputs.slots, k_pages, v_pages, eps)


class GatedMlp(Projected):
    """down(activation(gate) * up), or down(activation(up)) if the activation has no gate."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, place: str) -> None:
        """Take ownership of parameters: [2 * I, C], rows of gate, then up; and [C, I].

        Without a gate the first is [I, C].
        `place`: the prefix of both names in a layer of a checkpoint.
        """
        super().__init__(place, gate_up, down)
        self.activation = activation

    def between(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:  # noqa: ARG002
        """See `Projected`: [T, 2 * I], or without a gate [T, I], to [T, I]."""
        return gated_activation(projected, self.activation)


def _renew(owner: object) -> None:
    """Recompute the cached properties of an object that were read, in the same memory.

    Mutates their tensors: CUDA graphs read them there.
    """
    for name, held in vars(owner).items():
        attribute = getattr(type(owner), name, None)
        if isinstance(attribute, cached_property):
            _copy(attribute.func(owner), held)


def _copy(new: object, held: object) -> None:
    """Copy tensors that are alone, in a list or in the fields of a dataclass. Ignores other values."""
    if isinstance(held, torch.Tensor) and isinstance(new, torch.Tensor):
        held.copy_(new)
    elif isinstance(held, list | tuple) and isinstance(new, list | tuple):
        for part, into in zip(new, held, strict=True):
            _copy(part, into)
    elif dataclasses.is_dataclass(held):
        for field in dataclasses.fields(held):
            _copy(getattr(new, field.name), getattr(held, field.name))
