"""The tensors of one forward over a mixed batch. Built by `workers/batch.py`, read by models and kernels.

They are built on the host; the runner takes them to its device.

Dimension letters: T tokens of all items; N items; R wanted rows; P pages in the longest page table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One packed batch. Items follow each other in every tensor, decodes first.

    Owned by the caller of the forward; models and kernels only read it. The host-side twins
    (`query_lens`, `context_lens_host`) hold the same numbers as the tensors, so that no kernel has to
    read a device tensor back.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, index of the token in its sequence
    slots: torch.Tensor  # [T] int64, page * page_size + offset where the token's K and V are written
    query_starts: torch.Tensor  # [N + 1] int32, first row of each item, and T
    context_lens: torch.Tensor  # [N] int32, length of the sequence after the append
    page_tables: torch.Tensor  # [N, P] int32, pages of each sequence in order; unused entries are 0
    wanted_rows: torch.Tensor  # [R] int64, rows of T whose logits are wanted
    query_lens: Sequence[int]  # [N] tokens appended by each item
    context_lens_host: Sequence[int]  # [N]

    def to(self, device: torch.device) -> ForwardInputs:
        """The same on a device; itself if it is there."""
        if self.token_ids.device == device:
            return self
        tensors = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)
