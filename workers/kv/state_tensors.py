"""The memory of recurrent states: slots, each with the state of all layers after some tokens of a sequence.

The accounting of slots is in `states`. Memory is not initialised: a slot that was not written may contain
any bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from workers import huge_pages


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state, without a dimension for sequences."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of one."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateTensors:
    """Slots for states of these shapes: a state is a tensor of each, in this order."""

    def __init__(
        self, shapes: Sequence[StateShape], num_slots: int, spacing: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate. `spacing`: see `StateSlots`, which are made for this memory."""
        self.num_slots = num_slots
        self.spacing = spacing
        self.bytes_per_state = state_bytes(shapes)
        self.tensors = [
            huge_pages.empty((num_slots, *one.shape), one.dtype, torch.device(device)) for one in shapes
        ]

    def slot_views(self, slot: int) -> list[memoryview]:
        """The bytes of a slot on the CPU, as they are in memory: one piece for each tensor.

        Writing to them writes the slot.
        """
        return [memoryview(one[slot]) for one in self._slot_bytes]

    @cached_property
    def _slot_bytes(self) -> list[NDArray[np.uint8]]:
        # [slots, bytes of one] each
        plain = (tensor.view(torch.uint8).numpy() for tensor in self.tensors)
        return [tensor.reshape(self.num_slots, -1) for tensor in plain]

    def load(self, slot: int) -> list[torch.Tensor]:
        """A copy of the state in a slot: [1, ...] each."""
        return [tensor[slot : slot + 1].clone() for tensor in self.tensors]

    def store(self, slot: int, state: Sequence[torch.Tensor]) -> None:
        """Copy a state, [1, ...] each, into a slot. Mutates the slot."""
        for tensor, part in zip(self.tensors, state, strict=True):
            tensor[slot].copy_(part[0])


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """The bytes of a state."""
    return sum(one.nbytes for one in shapes)
