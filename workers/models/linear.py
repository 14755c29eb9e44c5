"""A projection of a model: one matrix, which may hold several projections of a checkpoint side by side.

Knows how tensors of a checkpoint fill it, and how it is laid out for the matrix library.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kernels.linear import linear, pack_weight

Allocate = Callable[..., torch.Tensor]
"""From sizes to a new tensor of the model's dtype, on its device."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of a checkpoint goes.

    Attributes:
        tensor: A view into a parameter; the checkpoint's tensor broadcasts to it.
        shape: The shape that the tensor has in the checkpoint.
        offset: Added to the checkpoint's numbers.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: float = 0.0

    def fill(self, part: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Write a checkpoint's tensor, or its rows from the `first` on; returns what was written to."""
        filled = self.tensor if first is None else self.tensor[first : first + part.shape[0]]
        filled.copy_(part)
        if self.offset:
            filled.add_(self.offset)
        return filled

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Target:
        """One that the checkpoint has in the same shape."""
        return cls(tensor, tuple(tensor.shape))


class Linear:
    """x W^T + b, with the projections of a checkpoint as rows of W one after the other."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Mapping[str, int]) -> None:
        """Take over parameters.

        Args:
            weight: [O, I].
            bias: [O].
            parts: What a checkpoint calls the projections, and how many outputs each has; O in all.
        """
        self.weight = weight
        self.bias = bias
        self._parts = dict(parts)

    @classmethod
    def allocate(
        cls, empty: Allocate, inputs: int, parts: Mapping[str, int], *, bias: bool = False
    ) -> Linear:
        """One whose parameters hold whatever was in memory until its targets are filled."""
        outputs = sum(parts.values())
        return cls(empty(outputs, inputs), empty(outputs) if bias else None, parts)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Where the tensors of a checkpoint go, by their names there, which begin with `prefix`."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                parts = torch.split(tensor, list(self._parts.values()))
                for name, part in zip(self._parts, parts, strict=True):
                    yield f"{prefix}{name}.{kind}", Target.whole(part)

    def pack(self) -> None:
        """Lay the filled weight out for the matrix library; its targets are of no use any more."""
        self.weight = pack_weight(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O], a new tensor."""
        return linear(x, self.weight, self.bias)
