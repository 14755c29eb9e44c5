"""What weights are filled with: parts of stored tensors."""

from __future__ import annotations

from typing import Protocol, Self

import torch

from kernels.weight import Weight


class QuantisedRows(Protocol):
    """Rows of a matrix that is quantised in its files, as weights in memory take them."""

    @property
    def nbytes(self) -> int:
        """Their size."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, rows: slice, /) -> Self:
        """Some of them."""

    def dense(self, group: int) -> torch.Tensor:
        """What they stand for: [n, I] float32. `group`: the inputs with one scale."""

    def write(self, weight: Weight, first: int) -> torch.Tensor:
        """Fill a weight from row `first` on. Returns what is finite if the rows are."""


Part = torch.Tensor | QuantisedRows
"""A part of a stored tensor."""
