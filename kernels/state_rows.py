"""Which rows of a batch follow which recurrent states, and which states are kept.

A recurrent layer computes a row of what it has made of the tokens before. Those are the rows before of the
same item, and before the item's first row they are in a state: a slot of a tensor [slots, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where T rows of N items read and write states. A batch does not read slots that it writes.

    Attributes:
        begins: [T] int64, the first row of the item of each row.
        sources: [T] int64, the slot of the state before that row; -1: there is no token before it.
        keeps: [T] int64, the slot where the state after each row is kept; -1: it is not.
        starts: [N + 1] int32, the first row of each item, and T.
    """

    begins: torch.Tensor
    sources: torch.Tensor
    keeps: torch.Tensor
    starts: torch.Tensor

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows after which a state is kept, and its slot: int64. Waits for a GPU."""
        rows = (self.keeps >= 0).nonzero()[:, 0]
        return rows, self.keeps[rows]


def scanned_rows(states: torch.Tensor, at: StateRows) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of each row, and the state before it, which the caller changes to that after it.

    Mutates `states`, [slots, ...]: writes those that are kept.
    """
    keeps = at.keeps.tolist()
    state = torch.zeros(states.shape[1:], device=states.device)
    for row, (begin, source) in enumerate(zip(at.begins.tolist(), at.sources.tolist(), strict=True)):
        if row == begin:
            state = torch.zeros_like(state) if source < 0 else states[source].clone()
        yield row, state
        if keeps[row] >= 0:
            states[keeps[row]] = state


def past_rows(
    inputs: torch.Tensor, rows: torch.Tensor, back: int, states: torch.Tensor, at: StateRows
) -> torch.Tensor:
    """The inputs of the tokens that are `back` before the tokens of these rows: [n] -> [n, C].

    `inputs`: [T, C]. `states`: [slots, B, C], the last B of them before an item, with B >= back.
    """
    begins, sources, places = at.begins[rows], at.sources[rows], rows - back
    in_state = states[sources.clamp(min=0), (states.shape[1] + places - begins).clamp(0, states.shape[1] - 1)]
    in_state = in_state.masked_fill((sources < 0)[:, None], 0.0)
    return torch.where((places >= begins)[:, None], inputs[places.clamp(min=0)], in_state)


def rows_before(inputs: torch.Tensor, states: torch.Tensor, at: StateRows) -> torch.Tensor:
    """[T, C]: for each row the input of the token before it; zeros for the first token of a sequence.

    Mutates `states`, [slots, 1, C]: writes the rows that are kept.
    """
    found = past_rows(inputs, torch.arange(len(inputs), device=inputs.device), 1, states, at)
    rows, slots = at.kept
    states[slots] = inputs[rows][:, None]
    return found
