"""How the rows of a mixed batch map to sequences and their pages.

Dimension letters: T tokens; N items; P pages in the longest page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import torch

from kernels.attention_trees import TokenTrees
from kernels.checks import INDEX_DTYPES, check_tensor


@dataclass(slots=True)
class AttentionBatch:
    """The rows and pages of each sequence, which are the same for all layers of a forward.

    Lengths are in tokens. `query_lens` and `context_lens_host` are host copies of the tensors, so that no
    kernel reads a device tensor back.

    Attributes:
        page_tables: [N, P] int32, the pages of each sequence in order; unused entries hold any valid page.
        query_starts: [N + 1] int32, first row of each item, and T.
        context_lens: [N] int32, length of each sequence, the new tokens included. 0: a padding item, whose
            rows of the result are zeros.
        query_lens: The number of new tokens of each item; T in all.
        context_lens_host: The values of `context_lens`.
        trees: The items that are token trees; None: there are none.
        plans: What a device has computed from the lengths for all layers; filled by the first of them.
    """

    page_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    query_lens: Sequence[int]
    context_lens_host: Sequence[int]
    trees: TokenTrees | None = None
    plans: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check the fields, once for all layers.

        Raises:
            ValueError, TypeError: A field is invalid; the message names it.
        """
        items = len(self.query_lens)
        check_tensor("page_tables", self.page_tables, (items, None), INDEX_DTYPES)
        check_tensor("query_starts", self.query_starts, (items + 1,), INDEX_DTYPES)
        check_tensor("context_lens", self.context_lens, (items,), INDEX_DTYPES)
        if len(self.context_lens_host) != items:
            raise ValueError(
                f"context_lens_host: must have {items} entries, got {len(self.context_lens_host)}"
            )
        # Mostly no item needs a second look, and a loop in Python would take longer than all else here.
        if min(self.query_lens, default=0) < 0 or any(map(gt, self.query_lens, self.context_lens_host)):
            self._check_lengths()
        if self.trees is not None:
            self.trees.check(self.query_lens)

    def _check_lengths(self) -> None:
        lengths = zip(self.query_lens, self.context_lens_host, strict=True)
        for item, (query_len, context) in enumerate(lengths):
            if query_len < 0:
                raise ValueError(f"query_lens: must not be negative, item {item} has {query_len}")
            if context < query_len and context != 0:
                raise ValueError(f"context_lens_host: item {item} has {context} for {query_len} new tokens")
