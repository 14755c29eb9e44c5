"""The tensors of one forward over a mixed batch. Built by `workers/batch.py`, read by models and kernels.

They are built on the host; the runner moves them to its device.

Dimension letters: T tokens of all items; N items; R wanted rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_trees import MAX_TREE_TOKENS, TokenTrees, depths_and_ancestors

__all__ = ["MAX_TREE_TOKENS", "AttentionBatch", "ForwardInputs", "TokenTrees", "depths_and_ancestors"]


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
    # [T] int32, the slot of each row's adapter; -1: it has none. None: no row has one.
    lora_slots: torch.Tensor | None = None
    # [T, L, E] int64: the experts that each row is computed with, E in each of the L layers that have any.
    # -1: the router chooses. None: it does for all rows.
    experts: torch.Tensor | None = None

    def to(self, device: torch.device) -> ForwardInputs:
        """A copy on a device; this object if it is there already."""
        if self.token_ids.device == device:
            return self
        attention = dataclasses.replace(self.attention, **_moved(self.attention, device))
        if attention.trees is not None:
            trees = dataclasses.replace(attention.trees, **_moved(attention.trees, device))
            attention = dataclasses.replace(attention, trees=trees)
        return dataclasses.replace(self, **_moved(self, device), attention=attention)


def _moved(record: AttentionBatch | ForwardInputs | TokenTrees, device: torch.device) -> dict[str, Any]:
    """The tensors among a record's fields, by name, on a device."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {
        name: value.to(device, non_blocking=True)
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
