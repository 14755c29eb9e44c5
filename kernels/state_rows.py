"""Which rows of a batch follow which recurrent states, and which states are kept.

A recurrent layer computes a row of what it has made of the tokens before. Those are the rows before of the
same item, and before the item's first row they are in a state: a slot of a tensor [slots, ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """Of T rows, after W of which a state is kept. Slots that are written are not read by the same batch.

    Attributes:
        begins: [T] int64, the first row of the item of each row.
        sources: [T] int64, the slot of the state before that row; -1: there is no token before it.
        write_ends: [W] int64: a state is that after the rows of an item below this one.
        write_slots: [W] int64, the slot of each.
    """

    begins: torch.Tensor
    sources: torch.Tensor
    write_ends: torch.Tensor
    write_slots: torch.Tensor
