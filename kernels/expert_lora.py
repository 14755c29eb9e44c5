"""Low-rank adapters of experts: what each adapter adds to a projection of each expert of a layer.

As in `kernels.lora`, but which A and B a row gets depends on its expert too. Only on the CPU.

Dimension letters: T tokens; E experts; S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu import lora as cpu
from kernels.lora import LoraTable
from kernels.lora_pairs import LoraPairs
from kernels.weight import Weight


class ExpertPairs:
    """What one adapter adds to one projection of all experts.

    Attributes:
        experts: [E]; None: nothing.
    """

    def __init__(self, experts: Sequence[LoraPairs | None]) -> None:
        """Take ownership of the matrices. They may be moved until `settle` is called."""
        self.experts = tuple(experts)

    def settle(self) -> None:
        """Note where the matrices are, before they are in a slot."""
        self.described = cpu.describe_experts(self.experts)

    def weights(self) -> list[Weight]:
        """All matrices, in the order in which they are read."""
        return [weight for pairs in self.experts if pairs is not None for weight in pairs.weights()]


class ExpertTable:
    """The adapters of one projection of all experts, by slot.

    Attributes:
        inputs: Those of the projection.
        outputs: The number of outputs of each part of it.
        slots: What is in each slot; None: nothing.
        compiled: What compiled kernels read of it.
    """

    def __init__(self, slots: int, inputs: int, outputs: Sequence[int]) -> None:
        """Make empty slots."""
        self.inputs, self.outputs = inputs, tuple(outputs)
        self.slots: list[ExpertPairs | None] = [None] * slots
        self.compiled = cpu.ExpertsTable(slots)

    def set(self, slot: int, pairs: ExpertPairs | None) -> None:
        """Replace what is in a slot; None: nothing is. Keeps `pairs` alive. Not while a forward runs."""
        self.slots[slot] = pairs
        self.compiled.set(slot, None if pairs is None else pairs.described)

    def of_expert(self, expert: int, dtype: torch.dtype) -> LoraTable:
        """The table of one expert, with the same slot numbers."""
        table = LoraTable(len(self.slots), self.inputs, self.outputs, dtype, torch.device("cpu"))
        for slot, pairs in enumerate(self.slots):
            table.set(slot, None if pairs is None else pairs.experts[expert])
        return table


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of a layer's experts in a forward.

    Attributes:
        gate_up: Those of the first projection.
        down: Those of the second.
        slots: [T] int32, the slot of each token; -1: it has no adapter.
    """

    gate_up: ExpertTable
    down: ExpertTable
    slots: torch.Tensor
