"""The weight of a projection: a matrix, whatever its layout in memory.

Each layout is a class: `kernels.linear.DenseWeight`, and those that compiled kernels of the CPU read.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


class CompiledPart(NamedTuple):
    """Rows of a weight in memory.

    Attributes:
        address: Theirs.
        form: That of their format, if they are in groups; see `kernels.group_formats`.
        outputs: Their number.
        scale_inputs: Of 8-bit floats the inputs with one scale; 0: they are something else.
    """

    address: int
    form: int | None
    outputs: int
    scale_inputs: int = 0


class Weight(ABC):
    """A matrix [O, I].

    Attributes:
        shape: [O, I].
        dtype: That of the rows that it is multiplied by, and of the results.
        data: Its memory. What moves it replaces this tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    data: torch.Tensor

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of its memory."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return self.data.nbytes

    @property
    def compiled(self) -> list[CompiledPart] | None:
        """What the CPU's compiled kernels read, in order. None: they cannot read this layout."""
        return [CompiledPart(self.data.data_ptr(), None, len(self))]

    def part(self, first: int) -> tuple[Weight, int]:
        """The weight that has a row in memory, and the row's index there. See `kernels.stacked_weight`."""
        return self, first

    @property
    def plain(self) -> torch.Tensor:
        """The matrix as it is in memory: [O, I]. Raises TypeError if it has another layout."""
        raise TypeError(f"a {type(self).__name__} is not plain")

    @abstractmethod
    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        """See `kernels.linear.linear`, which checks the arguments. `x` has rows."""

    def write(self, first: int, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - of those below
        """Fill it: replace the rows from `first` on. To a GPU, from pinned memory, a copy is only queued.

        Returns:
            What was written, or the scales of it, in any shape: finite if the rows are, and fit into it.

        Raises:
            TypeError: It is not to be filled any more.
        """
        raise TypeError(f"a {type(self).__name__} is not filled")

    @abstractmethod
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, a new tensor: [n] -> [n, I]. The indices must be from 0 to O - 1."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The matrix [O, I] in `dtype`; a new tensor, unless it is plain."""

    def packed(self) -> Weight:
        """The same weight in the layout of its device's kernels. It may take over the memory of this one."""
        return self
