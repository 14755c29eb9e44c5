"""The tensors of one forward over a mixed batch. Built by `workers/batch.py`, read by models and kernels.

They are built on the host; the runner moves them to its device.

Dimension letters: T tokens of all items; N items; R wanted rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_trees import MAX_TREE_TOKENS, TokenTrees, depths_and_ancestors
from kernels.state_rows import StateRows
from workers.kv.states import StateRun

__all__ = [
    "MAX_TREE_TOKENS",
    "AttentionBatch",
    "ForwardInputs",
    "StateRows",
    "TokenTrees",
    "depths_and_ancestors",
]


@dataclass(slots=True)
class ForwardInputs:
    """One packed batch. All tensors have the items in the same order, decodes first.

    Owned by the caller of the forward; models and kernels only read it.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, index of the token in its sequence; in a token tree, on its own path
    slots: torch.Tensor  # [T] int64, page * page_size + offset where the token's K and V are written
    wanted_rows: torch.Tensor  # [R] int64, rows of T whose logits are wanted
    attention: AttentionBatch  # of N items
    # [T] int32, the slot of each row's adapter; -1: no adapter. None: no row has one.
    lora_slots: torch.Tensor | None = None
    # [T, L, E] int64: the experts that each row is computed with, E in each of the L layers with experts.
    # -1: the router chooses them. None: it does for all rows.
    experts: torch.Tensor | None = None
    # [N] for a model with recurrent layers: the states that each item begins from and writes.
    states: Sequence[StateRun] = ()
    # The same for single tokens, in the memory that CUDA graphs read. None: use `states`.
    state_rows: StateRows | None = None

    def to(self, device: torch.device, *, pinned: bool = False) -> ForwardInputs:
        """A copy on a device; this object if it is on that device.

        `pinned`: copies from pinned memory, so that the host does not wait for the device's current work.
        """
        if self.token_ids.device == device:
            return self
        if pinned:
            attention = dataclasses.replace(self.attention, **_pinned(self.attention))
            return dataclasses.replace(self, **_pinned(self), attention=attention).to(device)
        attention = dataclasses.replace(self.attention, **_moved(self.attention, device))
        if attention.trees is not None:
            trees = dataclasses.replace(attention.trees, **_moved(attention.trees, device))
            attention = dataclasses.replace(attention, trees=trees)
        return dataclasses.replace(self, **_moved(self, device), attention=attention)

    def with_chunks(self, chunks: ForwardInputs) -> ForwardInputs:
        """One batch of these single tokens followed by chunks, on the device of both.

        Only the chunks may have trees and given experts.
        """
        count, first, second = len(self.positions), self.attention, chunks.attention
        width = max(first.page_tables.shape[1], second.page_tables.shape[1])
        lora_slots, experts, trees = None, chunks.experts, second.trees
        if self.lora_slots is not None or chunks.lora_slots is not None:
            lora_slots = torch.cat([_lora_slots(self), _lora_slots(chunks)])
        if experts is not None:
            experts = torch.cat([experts.new_full((count, *experts.shape[1:]), -1), experts])
        if trees is not None:
            trees = TokenTrees(
                roots=torch.cat([first.context_lens, trees.roots]),
                ancestors=torch.cat([trees.ancestors.new_zeros(count), trees.ancestors]),
                depths=torch.cat([trees.depths.new_zeros(count, trees.depths.shape[1]), trees.depths]),
                is_tree=[False] * count + list(trees.is_tree),
            )
        attention = AttentionBatch(
            page_tables=torch.cat([_widened(first.page_tables, width), _widened(second.page_tables, width)]),
            query_starts=torch.cat([first.query_starts[:count], second.query_starts + count]),
            context_lens=torch.cat([first.context_lens, second.context_lens]),
            query_lens=[*first.query_lens, *second.query_lens],
            context_lens_host=[*first.context_lens_host, *second.context_lens_host],
            trees=trees,
        )
        return ForwardInputs(
            token_ids=torch.cat([self.token_ids, chunks.token_ids]),
            positions=torch.cat([self.positions, chunks.positions]),
            slots=torch.cat([self.slots, chunks.slots]),
            wanted_rows=torch.cat([self.wanted_rows, chunks.wanted_rows + count]),
            attention=attention,
            lora_slots=lora_slots,
            experts=experts,
        )


def _lora_slots(inputs: ForwardInputs) -> torch.Tensor:
    """[T], even if no row has an adapter."""
    if inputs.lora_slots is not None:
        return inputs.lora_slots
    return torch.full_like(inputs.positions, -1, dtype=torch.int32)


def _widened(tables: torch.Tensor, pages: int) -> torch.Tensor:
    """Page tables [N, P] padded with zeros to `pages` pages."""
    return torch.nn.functional.pad(tables, (0, pages - tables.shape[1]))


_Record = AttentionBatch | ForwardInputs | TokenTrees


def tensors_of(record: _Record) -> dict[str, torch.Tensor]:
    """The tensors among a record's fields, by name."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _moved(record: _Record, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device, non_blocking=True) for name, value in tensors_of(record).items()}


def _pinned(record: _Record) -> dict[str, Any]:
    return {name: value.pin_memory() for name, value in tensors_of(record).items()}
