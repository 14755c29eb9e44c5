"""Steering vectors: what is added to the residual stream behind each layer, another one for each row or none.

Dimension letters: T rows; n rows that have one; S slots; L layers; C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workers.models.compiled_layers import Stage
from workers.models.layers import ForwardContext


@dataclass(frozen=True, slots=True)
class SteeredRows:
    """The rows of a forward that have vectors.

    Attributes:
        rows: [n] their numbers.
        vectors: [n, L, C] of the model's dtype.
    """

    rows: torch.Tensor
    vectors: torch.Tensor

    def of(self, wanted_rows: torch.Tensor) -> SteeredRows:
        """The same for some rows of the forward, in their order."""
        found, places = (wanted_rows[:, None] == self.rows).nonzero(as_tuple=True)
        return SteeredRows(found, self.vectors[places])


@dataclass(frozen=True, slots=True)
class SteeredStage:
    """The MLP of a layer, counted from 0, and the vectors behind it. Other rows keep their bits."""

    stage: Stage
    steered: SteeredRows
    layer: int

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Stage`."""
        x, residual = self.stage(x, residual, context)
        assert x is not None, "only what fuses launches on a GPU returns none"
        x[self.steered.rows] += self.steered.vectors[:, self.layer]
        return x, residual


def pack_steering(
    vectors: Mapping[int, torch.Tensor], shape: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The vectors [C] of an adapter as [L, C]; None: it has none. Raises ValueError if one does not fit."""
    if not vectors:
        return None
    if shape is None or not vectors.keys() <= set(range(shape[0])):
        raise ValueError(f"layer {max(vectors)}: the model has no vector there")
    packed = torch.zeros(shape, dtype=dtype)
    for layer, vector in vectors.items():
        packed[layer].copy_(vector)
    return packed


class SteeringTable:
    """The vectors of a model, by slot. On the thread of forwards."""

    def __init__(self, slots: int) -> None:
        """Make empty slots."""
        # [L, C] each.
        self._vectors: list[torch.Tensor | None] = [None] * slots

    def set(self, slot: int, vectors: torch.Tensor | None) -> None:
        """Replace what is in a slot; None: nothing is."""
        self._vectors[slot] = vectors

    def rows(self, slots: torch.Tensor) -> SteeredRows | None:
        """The rows that have vectors. None: no row has. `slots`: [T] int32, -1: the row has no adapter."""
        if not any(each is not None for each in self._vectors):
            return None
        found = [(row, self._vectors[slot]) for row, slot in enumerate(slots.tolist()) if slot >= 0]
        steered = [(row, vectors) for row, vectors in found if vectors is not None]
        if not steered:
            return None
        rows = torch.tensor([row for row, _ in steered])
        return SteeredRows(rows, torch.stack([vectors for _, vectors in steered]))
