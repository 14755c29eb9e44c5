"""Weights whose inputs are in another order than those of the rows that they multiply.

GPTQ may put any inputs into a group ("act order"). Here the columns of a weight are in the order of the
groups, and a product takes the inputs of its rows in that order, which changes no value.

Dimension letters: T rows; I inputs; O outputs.
"""

from __future__ import annotations

import torch

from kernels.weight import Weight


class PermutedWeight(Weight):
    """A weight [O, I] whose column of input `order[i]` is column i of the weight within.

    Attributes:
        within: The weight with the columns in their order. It is filled, and then `order` is set.
    """

    def __init__(self, within: Weight) -> None:
        """Take ownership of a weight. The order is the identity until `reorder`."""
        self.within = within
        self.shape, self.dtype, self.data = within.shape, within.dtype, within.data
        self._order: torch.Tensor | None = None  # [I] int64
        self._places: torch.Tensor | None = None  # the inverse

    def reorder(self, order: torch.Tensor) -> None:
        """Set which input each column of the weight within has: [I] int64, a permutation."""
        inputs = torch.arange(self.shape[1])
        if not torch.equal(order.sort().values, inputs):
            raise ValueError("order: must be a permutation of the inputs")
        is_other = not torch.equal(order, inputs)
        order = order.to(self.within.device)
        self._order, self._places = (order, order.argsort()) if is_other else (None, None)

    @property
    def compiled(self) -> None:
        """None: compiled sublayers do not reorder inputs."""
        return None

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool = False
    ) -> torch.Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        return self.within.multiply(x, bias, batch_invariant=batch_invariant)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self._in_place(self.within.rows(indices))

    def dense(self) -> torch.Tensor:
        return self._in_place(self.within.dense())

    def packed(self) -> Weight:
        """See `Weight`: without an order, the weight within."""
        self.within = self.within.packed()
        return self.within if self._order is None else self

    def _in_place(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._places is None else rows.index_select(1, self._places)
