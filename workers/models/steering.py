"""Steering vectors, which are added to the residual stream after each layer. Each row has its own or none.

Dimension letters: T rows; n rows that have vectors; S slots; L layers; C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.models.compiled_layers import Stage
from workers.models.layers import ForwardContext


class SteeredRows:
    """The rows of a forward that have vectors. Rows may share a set of vectors."""

    def __init__(self, sets: torch.Tensor, vectors: torch.Tensor) -> None:
        """Take the vectors of a forward.

        Args:
            sets: [T] int64, the index of each row's set of vectors; -1: none.
            vectors: [sets, L, C] in the model's dtype.
        """
        self._sets, self._vectors = sets, vectors
        self._rows = (sets >= 0).nonzero()[:, 0]  # [n]
        self._sets_of_rows = sets[self._rows]  # [n]

    def of(self, wanted_rows: torch.Tensor) -> SteeredRows:
        """The vectors for some rows of the forward, in their order."""
        return SteeredRows(self._sets.index_select(0, wanted_rows), self._vectors)

    def add(self, x: torch.Tensor, layer: int) -> None:
        """Add the vectors of a layer, counted from 0, to its output [T, C]. Other rows keep their bits."""
        x[self._rows] += self._vectors[self._sets_of_rows, layer]


@dataclass(frozen=True, slots=True)
class SteeredStage:
    """A `Stage` that ends with the last sublayer of a layer, counted from 0, and then adds its vectors."""

    stage: Stage
    steered: SteeredRows
    layer: int

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.stage(x, residual, context)
        assert x is not None, "only what fuses launches on a GPU returns none"
        self.steered.add(x, self.layer)
        return x, residual


def pack_steering(
    vectors: Mapping[int, torch.Tensor], shape: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Stacks the vectors [C] of an adapter to [L, C]. None: it has none. Raises ValueError for a misfit."""
    if not vectors:
        return None
    if shape is None or not vectors.keys() <= set(range(shape[0])):
        raise ValueError(f"layer {max(vectors)}: the model has no vector there")
    packed = torch.zeros(shape, dtype=dtype)
    for layer, vector in vectors.items():
        packed[layer].copy_(vector)
    return packed


class SteeringTable:
    """The vectors of a model's adapters, by slot. Used only on the thread of forwards."""

    def __init__(self, slots: int) -> None:
        """Make empty slots."""
        # [L, C] for each slot.
        self._vectors: list[torch.Tensor | None] = [None] * slots

    def set(self, slot: int, vectors: torch.Tensor | None) -> None:
        """Set the vectors of a slot. None: empties it."""
        self._vectors[slot] = vectors

    def rows(self, slots: torch.Tensor) -> SteeredRows | None:
        """The rows that have vectors. None: no row has any. `slots`: [T] int32; -1: no adapter."""
        if not any(each is not None for each in self._vectors):
            return None
        used = [slot for slot in sorted({*slots.tolist()}) if slot >= 0]
        present = {slot: vectors for slot in used if (vectors := self._vectors[slot]) is not None}
        if not present:
            return None
        # One more than the slots: index -1 is the last.
        sets = torch.full((len(self._vectors) + 1,), -1)
        sets[[*present]] = torch.arange(len(present))
        return SteeredRows(sets[slots.long()], torch.stack([*present.values()]))
