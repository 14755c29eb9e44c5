"""Rows of several weights as one: where fused projections have different formats.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kernels.weight import CompiledPart, Weight


class StackedWeight(Weight):
    """Weights [O, I] of the same inputs and dtype, one after the other.

    Attributes:
        parts: They.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        """Take ownership of them."""
        self.parts = [*parts]
        self.dtype = parts[0].dtype
        self.shape = torch.Size((sum(map(len, parts)), parts[0].shape[1]))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def compiled(self) -> list[CompiledPart] | None:
        found: list[CompiledPart] = []
        for part in self.parts:
            if part.compiled is None:
                return None
            found += part.compiled
        return found

    def part(self, first: int) -> tuple[Weight, int]:
        for part in self.parts:
            if first < len(part):
                return part, first
            first -= len(part)
        raise ValueError(f"there is no row {first + len(self)} of {len(self)}")

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        sizes = [*map(len, self.parts)]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        products = (
            part.multiply(x, own, batch_invariant=batch_invariant)
            for part, own in zip(self.parts, biases, strict=True)
        )
        return torch.cat([*products], dim=1)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(indices), self.shape[1], dtype=self.dtype, device=indices.device)
        ends = [*itertools.accumulate(map(len, self.parts))]
        for part, end in zip(self.parts, ends, strict=True):
            of_part = (indices >= end - len(part)) & (indices < end)
            found[of_part] = part.rows(indices[of_part] - (end - len(part)))
        return found

    def dense(self) -> torch.Tensor:
        return torch.cat([part.dense() for part in self.parts])

    def packed(self) -> Weight:
        return StackedWeight([part.packed() for part in self.parts])
