"""Prepares a batch for recurrent layers: adds the tokens to recompute, and maps rows to states.

See `workers.kv.states`: a sequence may be longer than its last state. The tokens in between are recomputed
before the item's own. Their keys and values are in the pages already, and are not written.

Dimension letters: T tokens of all items; N items.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import numpy as np
import torch

from kernels.state_rows import StateRows
from workers.kv.states import EMPTY
from workers.models.inputs import ForwardInputs


def with_tokens_before(inputs: ForwardInputs) -> ForwardInputs:
    """The batch including the tokens to recompute; the same object if there are none.

    The wanted rows are of the same tokens as before.
    """
    added = [len(run.before) for run in inputs.states]
    if not any(added):
        return inputs
    assert inputs.attention.trees is None, "no model with states takes them"
    lens, device = inputs.attention.query_lens, inputs.token_ids.device
    new_lens = [count + more for count, more in zip(lens, added, strict=True)]
    begins = accumulate(lens, initial=0)
    tokens, positions = list[torch.Tensor](), list[torch.Tensor]()
    slots, old_rows = list[torch.Tensor](), list[torch.Tensor]()
    for run, begin, count in zip(inputs.states, begins, lens, strict=False):
        own = torch.arange(begin, begin + count, device=device)
        before = torch.arange(run.source.position, run.source.position + len(run.before), device=device)
        again = torch.tensor(list(run.before), dtype=torch.int64, device=device)
        tokens += [again, inputs.token_ids[own]]
        positions += [before, inputs.positions[own]]
        slots += [torch.full_like(before, -1), inputs.slots[own]]
        old_rows += [torch.full_like(before, begin), own]
    lora_slots = inputs.lora_slots
    # [T], for the old rows
    shifts = torch.tensor([*accumulate(added)]).repeat_interleave(torch.tensor(lens)).to(device)
    starts = torch.tensor([0, *accumulate(new_lens)], dtype=torch.int32, device=device)
    return dataclasses.replace(
        inputs,
        token_ids=torch.cat(tokens),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        wanted_rows=inputs.wanted_rows + shifts[inputs.wanted_rows],
        experts=_experts_with_before(inputs.experts, torch.cat(slots) < 0, torch.cat(old_rows)),
        attention=dataclasses.replace(inputs.attention, query_starts=starts, query_lens=new_lens),
        lora_slots=None if lora_slots is None else lora_slots[torch.cat(old_rows)],
    )


def _experts_with_before(
    given: torch.Tensor | None, are_before: torch.Tensor, old_rows: torch.Tensor
) -> torch.Tensor | None:
    """The given experts of each row. Recomputed tokens have none.

    Only scorings have given experts, and they begin at a state.
    """
    return None if given is None else given[old_rows].masked_fill(are_before[:, None, None], -1)


def state_rows(inputs: ForwardInputs) -> StateRows:
    """The states that the rows of a batch continue and write, on its device.

    `inputs`: the batch including the tokens to recompute.
    """
    runs, query_lens = inputs.states, inputs.attention.query_lens
    starts = [*accumulate(query_lens, initial=0)][:-1]
    sources = [run.source.slot for run in runs]
    of_rows = np.repeat(np.array([starts, sources, [EMPTY] * len(runs)], np.int64), query_lens, axis=1)
    for start, run in zip(starts, runs, strict=True):
        for held in run.writes:
            of_rows[2, start + held.position - run.source.position - 1] = held.slot
    begins, row_sources, keeps = torch.from_numpy(of_rows).to(inputs.token_ids.device)  # [3, T]
    return StateRows(begins, row_sources, keeps, inputs.attention.query_starts)
