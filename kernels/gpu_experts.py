"""The matrices of all experts of a layer in a GPU's memory, where they stay quantised.

Dimension letters: E experts; O outputs; I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.gpu_weight import GpuWeight
from kernels.stacked_weight import StackedWeight
from kernels.weight import Weight


class GpuExperts:
    """E matrices [O, I]. Rows with the same place in each of them have the same format.

    Attributes:
        stacks: For each format a weight [E * rows, I]: its rows of one expert after the other.
    """

    def __init__(self, stacks: Sequence[GpuWeight], count: int) -> None:
        """Take ownership of the stacks. `count`: E."""
        self.stacks = tuple(stacks)
        self._experts = [self._expert(number, count) for number in range(count)]

    def _expert(self, number: int, count: int) -> Weight:
        parts = []
        for stack in self.stacks:
            rows = len(stack) // count
            parts.append(stack.view(range(number * rows, (number + 1) * rows)))
        return parts[0] if len(parts) == 1 else StackedWeight(parts)

    def __len__(self) -> int:
        return len(self._experts)

    def __getitem__(self, expert: int) -> Weight:
        return self._experts[expert]
