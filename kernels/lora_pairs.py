"""The matrices of an adapter for one projection, and which rows they are for: see `kernels.lora`.

Dimension letters: T rows; I inputs; r rank; S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from kernels.linear import DenseWeight, pack_weight
from kernels.weight import Weight

MAX_RANK = 256

# A [r, I] and B [outputs of the part, r] of one part; None: it has none.
Pair = tuple[torch.Tensor, torch.Tensor] | None


class LoraPairs:
    """What one adapter adds to one projection.

    Attributes:
        ranks: That of each part, rounded up to an even number, since products take inputs in pairs; 0: none.
        starts: Where the ranks of each part begin in `a`.
        a: [sum of the ranks, I], the parts one after the other; or [rank, I], if they share it.
        b: [outputs of the part, rank] for each part; None: the part has none.
        scales: [O] float32, what the sums of the parts that are not None are multiplied by; None: they stay.
        shifts: [O] float32, what is added then; None: nothing.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        *,
        pack: bool,
        scales: torch.Tensor | None = None,
        shifts: torch.Tensor | None = None,
    ) -> None:
        """Convert and copy matrices.

        Args:
            pairs: For each part, at least one of them not None. Packed, parts with the same A share it.
            inputs: I.
            outputs: The number of outputs of each part.
            dtype: That of the projection.
            pack: Pack the matrices, if there is a compiled product for them.
            scales, shifts: See the attributes.

        Raises:
            ValueError: A shape does not fit, or a rank is not from 1 to MAX_RANK.
        """

        def converted(matrix: torch.Tensor) -> Weight:
            matrix = matrix.to(dtype)
            return pack_weight(matrix) if pack else DenseWeight(matrix)

        even = [_even(pair, inputs, width) for pair, width in zip(pairs, outputs, strict=True)]
        every = [pair[0] for pair in even if pair is not None]
        self.ranks = tuple(0 if pair is None else len(pair[0]) for pair in even)
        self.starts = tuple(accumulate(self.ranks, initial=0))[:-1]
        if pack and len({id(pair[0]) for pair in pairs if pair is not None}) == 1:
            every, self.starts = every[:1], (0,) * len(even)
        self.a = converted(torch.cat(every))
        self.b = tuple(None if pair is None else converted(pair[1]) for pair in even)
        self.scales, self.shifts = scales, shifts

    def weights(self) -> list[Weight]:
        """All matrices, in the order in which they are read."""
        return [self.a, *(each for each in self.b if each is not None)]


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Row numbers sorted by slot.

    Attributes:
        rows: [T] int64. Those without an adapter are first.
        starts: [S + 1] int64, where the rows of each slot begin.
    """

    rows: torch.Tensor
    starts: torch.Tensor


def _even(pair: Pair, inputs: int, outputs: int) -> Pair:
    """A pair whose rank is rounded up with zeros to an even number. Raises ValueError for a wrong shape."""
    if pair is None:
        return None
    a, b = pair
    rank = len(a)
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"the rank must be from 1 to {MAX_RANK}, got {rank}")
    for name, matrix, shape in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if tuple(matrix.shape) != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(matrix.shape)}")
    odd = rank % 2
    return functional.pad(a, (0, 0, 0, odd)), functional.pad(b, (0, odd))
