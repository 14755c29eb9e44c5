"""Adapters of a decoder: the projections that may have them, their slots, and steering vectors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from kernels.lora import row_slots
from kernels.lora_pairs import MAX_RANK
from kernels.weight import Weight
from workers.models.config import ModelConfig
from workers.models.layers import ForwardContext, Sublayer
from workers.models.lora import (
    Adaptable,
    BaseMatrix,
    ExpertProjection,
    ExpertStack,
    LoraWeights,
    PackedLora,
    Projection,
    pack_lora,
)
from workers.models.shard import Shard
from workers.models.steering import SteeringTable, pack_steering

Layer = tuple[Sublayer, ...]
"""Attention or what is in its place, then the MLP or experts; or only one of the two."""


class Adapted:
    """The base of `Decoder`, which has the layers. Only native models take adapters."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Weight
    lm_head: Weight
    layers: list[Layer]
    _shard: Shard

    def __init__(self) -> None:
        self.max_lora_slots = 0
        self._steering = SteeringTable(0)
        # Until slots are allocated, adapters of any rank that kernels support can be packed.
        self._max_lora_rank = MAX_RANK

    def _compile(self) -> None:
        """Called when the slots have changed."""
        raise NotImplementedError

    def adaptable(self) -> Adaptable:
        """The projections that adapters may change; on a CPU without a group also steering vectors and DoRA.

        A rank has only a part of each row, and there is no GPU kernel for DoRA.
        """
        modules: dict[str, tuple[int, int]] = {}
        stacks: dict[str, ExpertStack] = {}
        for prefix, projection in self.projections():
            modules |= {prefix + name: shape for name, shape in projection.modules()}
            if isinstance(projection, ExpertProjection):
                stacks[prefix + projection.name] = projection.stack(prefix)
            elif projection.parameter is not None:
                (name,) = projection.parts
                stacks[prefix + projection.parameter] = ExpertStack(((prefix + name,),))
        is_whole_on_cpu = self.device.type == "cpu" and self._shard.group is None
        return Adaptable(
            modules, stacks, self._base_matrices(), self._steering_shape, takes_dora=is_whole_on_cpu
        )

    def _base_matrices(self) -> dict[str, BaseMatrix]:
        """The embedding and the head. None in a group, where a rank has only a part of them."""
        if self._shard.group is not None:
            return {}

        def rows(matrix: Weight, which: range) -> torch.Tensor:
            indices = torch.tensor(which, device=self.device)
            # Adapters are read on another thread, and kernels are launched on the current thread's device.
            with torch.cuda.device_of(indices):  # type: ignore[no-untyped-call]
                return matrix.rows(indices)

        shape = self.config.vocab_size, self.config.hidden_size
        named = {"model.embed_tokens.weight": self.embedding, "lm_head.weight": self.lm_head}
        return {name: BaseMatrix(shape, partial(rows, matrix)) for name, matrix in named.items()}

    @property
    def _steering_shape(self) -> tuple[int, int] | None:
        """[layers, hidden width] of steering vectors. None: not supported, in a group or on a GPU.

        CUDA graphs cannot add vectors that come and go.
        """
        if self.device.type != "cpu" or self._shard.group is not None:
            return None
        return len(self.layers), self.config.hidden_size

    def lora_slot_bytes(self, max_rank: int) -> int:
        """The memory of a slot on a GPU in bytes, for this rank's part of the model."""
        return sum(projection.lora_slot_bytes(max_rank) for _, projection in self.projections())

    def allocate_lora(self, slots: int, max_rank: int) -> None:
        """Allocate empty slots for adapters up to rank `max_rank`, between two forwards and on their thread.

        Call once, after the parameters are packed. Raises torch.OutOfMemoryError if memory runs out, without
        an effect then.
        """
        try:
            for _, projection in self.projections():
                projection.allocate_lora(slots, max_rank)
        except torch.OutOfMemoryError:
            for _, projection in self.projections():
                projection.allocate_lora(0, max_rank)
            raise
        self.max_lora_slots, self._max_lora_rank = slots, max_rank
        self._steering = SteeringTable(slots)
        self._compile()

    def pack_lora(
        self, weights: LoraWeights, steering: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> PackedLora:
        """Convert an adapter for `set_lora`, on any thread. `steering`: [C] by layer.

        Raises ValueError if it does not fit; see `workers.models.lora`.
        """
        on_cpu = self.device.type == "cpu"
        packed = pack_lora(weights, self.projections(), self._max_lora_rank, self.dtype, pack=on_cpu)
        if any(pair.magnitude is not None for pair in weights.values()):
            packed = replace(packed, made_for=weakref.ref(self))
        vectors = pack_steering(steering, self._steering_shape, self.dtype)
        if vectors is None:
            return packed
        return replace(packed, bytes=packed.bytes + vectors.nbytes, steering=vectors)

    def set_lora(self, slot: int, packed: PackedLora | None) -> None:
        """Replace the adapter of a slot. None: empties it. Call on the thread of `forward`.

        Args:
            slot: From 0 to `max_lora_slots` - 1.
            packed: From `pack_lora`. It may be in several slots.
        """
        if not 0 <= slot < self.max_lora_slots:
            raise IndexError(f"slot: must be from 0 to {self.max_lora_slots - 1}, got {slot}")
        projections = self.projections()
        added = [None] * len(projections) if packed is None else packed.projections
        for (_, projection), pairs in zip(projections, added, strict=True):
            assert projection.lora is not None
            projection.lora.set(slot, pairs)  # type: ignore[arg-type]  # what its `pairs_of` has made
        self._steering.set(slot, None if packed is None else packed.steering)

    def projections(self) -> list[tuple[str, Projection]]:
        """The projections that may have adapters, each with the prefix of its modules' names."""
        return [
            (f"model.layers.{index}.{name}", projection)
            for index, layer in enumerate(self.layers)
            for sublayer in layer
            for name, projection in sublayer.body.projections()
        ]

    def _with_slots(self, context: ForwardContext, slots: torch.Tensor) -> ForwardContext:
        """The context of rows with adapters. `slots`: [T]."""
        wanted = slots.index_select(0, context.inputs.wanted_rows)  # [R]
        of_rows, of_wanted = (row_slots(each, self.max_lora_slots) for each in (slots, wanted))
        return replace(context, lora_slots=of_rows, wanted_lora_slots=of_wanted)
