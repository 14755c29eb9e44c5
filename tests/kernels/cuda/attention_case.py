"""Batches for the attention kernels, with NaN in all that must not be read, and how far off results may be.

Dimension letters: T tokens; N items; H query heads; K key-value heads; D width of a key; V width of a value;
S tokens a page.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.attention_batch import AttentionBatch
from tests.kernels.attention_features import SCORINGS
from tests.kernels.references import attention64

# Rows behind the last one of a result, which nobody may write.
GUARD_ROWS = 3


@dataclass
class AttentionCase:
    """A batch in pages, and the same numbers dense.

    Attributes:
        query: [T, H, D], a view of something wider, as the queries of the decoder are.
        k_pages: [pages, S, K, D].
        v_pages: [pages, S, K, V].
        batch: Rows and pages, on the device of the tensors.
        keys: [length, K, D] on the CPU for each item.
        values: [length, K, V] on the CPU for each item.
        scale: Of the scores.
        window: Positions a token sees, or None.
        features: Softcap, sinks and slopes, as keyword arguments of the kernels.
    """

    query: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scale: float
    window: int | None
    features: dict[str, Any] = field(default_factory=dict)

    def new_out(self) -> torch.Tensor:
        """Room for the result and for rows that must stay as they are: NaN."""
        rows, heads, _ = self.query.shape
        shape = (rows + GUARD_ROWS, heads, self.v_pages.shape[3])
        return torch.full(shape, float("nan"), dtype=self.query.dtype, device=self.query.device)

    def check(self, out: torch.Tensor) -> None:
        """Compare a result [T, H, V], or one made by `new_out`, with float64.

        Allowed is twice what rounding the exact result costs, plus 1e-6 for the float32 accumulation, as in
        `assert_close`, and what the kernels lose by design. They round the weights of the softmax to the
        dtype of the values, as the tensor cores want it, but not their sum, by which they divide. A weight is
        off by a factor of at most 1 +- u, where u is half the spacing of numbers at 1, and so the result by u
        times the same average of absolute values. Weights too small for that are off by half the smallest
        number, each; the sum of weights is at least 1.
        """
        rows = len(self.query)
        actual = out[:rows].cpu().double()
        exact = self._exact(self.values)
        if rows == 0:
            return
        dtype = self.query.dtype
        floor = (exact.to(dtype).double() - exact).abs().max()
        allowed = 2 * (floor + 1e-6)
        if dtype is not torch.float32:
            info = torch.finfo(dtype)
            largest = max((value.abs().max().item() for value in self.values if len(value)), default=0.0)
            longest = max(map(len, self.values), default=0)
            allowed = allowed + info.eps / 2 * self._exact([value.abs() for value in self.values])
            allowed += longest * largest * info.smallest_normal * info.eps / 2
        assert torch.isfinite(actual).all(), "not finite"
        excess = ((actual - exact).abs() - allowed).max().item()
        assert excess <= 0, f"off by {excess} more than allowed; rounding alone costs {floor.item()}"
        assert out[rows:].isnan().all(), "rows behind the last one were written"

    def _exact(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        features: dict[str, Any] = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.features.items()
        }
        lengths = self.batch.query_lens
        return attention64(self.query.cpu(), self.keys, values, lengths, self.scale, self.window, **features)


def make_case(
    items: Sequence[tuple[int, int]],
    device: str,
    *,
    group: int = 2,
    kv_heads: int = 1,
    width: int = 32,
    value_width: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    features: Sequence[str] = (),
    seed: int = 0,
) -> AttentionCase:
    """A batch of (query_len, context_len) items in shuffled pages.

    NaN are: slots behind the end of an item, slots before the window of its first new token, and page 0,
    which all unused entries of the page tables name. `features` are of SCORINGS.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // page_size) for _, context in items]
    free = list(range(1, sum(needed) + 3))
    random.Random(seed).shuffle(free)
    widths = (width, value_width or width)
    shapes = [(len(free) + 1, page_size, kv_heads, each) for each in widths]
    pages = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
    tables = torch.zeros(len(items), max([*needed, 0]) + 1, dtype=torch.int32)
    dense: list[list[torch.Tensor]] = [[], []]
    for index, (query_len, context) in enumerate(items):
        owned = torch.tensor([free.pop() for _ in range(needed[index])], dtype=torch.int64)
        tables[index, : len(owned)] = owned
        oldest = 0 if window is None else max(0, context - query_len - window + 1)
        for which in range(2):
            rows = torch.randn(context, kv_heads, widths[which], generator=generator).to(dtype)
            dense[which].append(rows)
            seen = torch.arange(oldest, context)
            pages[which][owned[seen // page_size], seen % page_size] = rows[oldest:]
    query_lens = [query_len for query_len, _ in items]
    starts = [sum(query_lens[:i]) for i in range(len(items) + 1)]
    contexts = [context for _, context in items]
    packed = torch.full((starts[-1], (group + 2) * kv_heads, width), float("nan")).to(dtype)
    heads = group * kv_heads
    packed[:, :heads] = torch.randn(starts[-1], heads, width, generator=generator).to(dtype)
    batch = AttentionBatch(
        page_tables=tables.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens_host=contexts,
    )
    query = packed.to(device)[:, :heads]
    told = {name: SCORINGS[name](heads) for name in features}
    told |= {name: value.to(device) for name, value in told.items() if isinstance(value, torch.Tensor)}
    return AttentionCase(
        query,
        pages[0].to(device),
        pages[1].to(device),
        batch,
        dense[0],
        dense[1],
        width**-0.5,
        window,
        told,
    )
