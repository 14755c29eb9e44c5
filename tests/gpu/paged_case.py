"""Attention at real sizes: a batch in pages made on the device, and its result in float64, there too.

Dimension letters: T tokens; N items; H query heads; K key-value heads; G = H / K; D head width; S tokens a
page; P pages in the longest page table; Q rows that are checked at once; L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention_batch import AttentionBatch

PAGE_SIZE = 16
# Scores of this many elements at a time, in float64: 1 GiB.
_SCORES = 1 << 27


@dataclass
class PagedCase:
    """A batch, its pages, and what is needed to say what should come out.

    Attributes:
        query: [T, H, D].
        k_pages: [pages, S, K, D], NaN in every slot that holds no token.
        v_pages: As k_pages.
    """

    query: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def check(self, out: torch.Tensor) -> None:
        """Compare a result [T, H, D] with float64.

        What may differ is derived in `AttentionCase.check`, and for float32 there is one thing more, which
        shows among millions of results. A score is a sum of D products; its rounding errors are of either
        sign and add up to about sqrt(D) half units in the last place, relative to |q| |k| scale, here about
        sqrt(D). A weight is off by as much, and the result by that times the average distance of values.
        """
        assert torch.isfinite(out).all(), "not finite"
        first = 0
        for item, query_len in enumerate(self.batch.query_lens):
            rows = slice(first, first + query_len)
            first += query_len
            if self.batch.context_lens_host[item]:
                self._check_item(out[rows], self.query[rows], item)
            else:
                assert not out[rows].any()

    def _check_item(self, out: torch.Tensor, query: torch.Tensor, item: int) -> None:
        context, kv_heads = self.batch.context_lens_host[item], self.k_pages.shape[2]
        pages = self.batch.page_tables[item, : -(-context // PAGE_SIZE)].long()
        keys, values = (source[pages].flatten(0, 1)[:context] for source in (self.k_pages, self.v_pages))
        group = query.shape[1] // kv_heads
        block = max(1, _SCORES // (group * context))
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            key, value = keys[:, head].double(), values[:, head].double()  # [L, D]
            for begin in range(0, len(query), block):
                rows = slice(begin, begin + block)
                position = context - len(query) + torch.arange(len(query), device=query.device)[rows]
                weights = self._weights(query[rows, heads], key, position)  # [Q, G, L]
                self._compare(out[rows, heads], weights, value)

    def _weights(self, query: torch.Tensor, key: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        scores = query.double() @ key.T * self.scale  # [Q, G, L]
        index = torch.arange(len(key), device=key.device)
        hidden = index > position[:, None]  # [Q, L]
        if self.window is not None:
            hidden |= index <= position[:, None] - self.window
        return scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)

    def _compare(self, out: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> None:
        exact = weights @ value  # [Q, G, D]
        dtype = self.query.dtype
        floor = (exact.to(dtype).double() - exact).abs().max()
        allowed = 2 * (floor + 1e-6)
        if dtype is torch.float32:
            score_error = value.shape[1] * torch.finfo(dtype).eps / 2
            allowed = allowed + score_error * (weights @ value.abs() + exact.abs())
        else:
            info = torch.finfo(dtype)
            allowed = allowed + info.eps / 2 * (weights @ value.abs())
            allowed += len(value) * value.abs().max() * info.smallest_normal * info.eps / 2
        excess = ((out.double() - exact).abs() - allowed).max().item()
        assert excess <= 0, f"off by {excess} more than allowed; rounding alone costs {floor.item()}"


def make_case(
    items: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    window: int | None = None,
    num_pages: int | None = None,
    first_page: int = 1,
) -> PagedCase:
    """A batch of (query_len, context) items in shuffled pages from `first_page` on, of a pool of `num_pages`.

    Page 0, which unused entries of the page tables name, and all slots without a token hold NaN.
    """
    generator = torch.Generator(device).manual_seed(0)
    needed = [-(-context // PAGE_SIZE) for _, context in items]
    total = first_page + sum(needed)
    shape = (num_pages or total, PAGE_SIZE, kv_heads, width)
    k_pages, v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    free = first_page + torch.randperm(sum(needed), device=device, generator=generator)
    tables = torch.zeros(len(items), max(needed) + 1, dtype=torch.int32, device=device)  # [N, P]
    taken = 0
    for item, ((_, context), count) in enumerate(zip(items, needed, strict=True)):
        owned = free[taken : taken + count]
        taken += count
        tables[item, :count] = owned
        positions = torch.arange(context, device=device)
        for pages in (k_pages, v_pages):
            tokens = torch.randn(context, kv_heads, width, device=device, generator=generator).to(dtype)
            pages[owned[positions // PAGE_SIZE], positions % PAGE_SIZE] = tokens
    query_lens = [query_len for query_len, _ in items]
    contexts = [context for _, context in items]
    starts = [sum(query_lens[:item]) for item in range(len(items) + 1)]
    # A view of wider rows, as the queries of a fused projection are.
    wide = torch.randn(starts[-1], heads + 2 * kv_heads, width, device=device, generator=generator).to(dtype)
    batch = AttentionBatch(
        page_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens_host=contexts,
    )
    return PagedCase(wide[:, :heads], k_pages, v_pages, batch, window)
