"""Parts of stored tensors, from which weights are filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class QuantisedRows(ABC):
    """Rows of a matrix that files have quantised, in the form that weights in memory take."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of the values, for reports of progress."""
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    @abstractmethod
    def __getitem__(self, rows: slice, /) -> Self:
        """A slice of the rows."""

    @abstractmethod
    def dense(self, group: int) -> torch.Tensor:
        """[n, I] float32, the dequantised rows. `group`: the number of inputs with one scale."""

    @abstractmethod
    def write(self, weight: Weight, first: int) -> torch.Tensor:
        """Fill a weight from row `first` on. Returns a tensor that is finite if the rows are."""


Part = torch.Tensor | QuantisedRows
"""A part of a stored tensor."""
