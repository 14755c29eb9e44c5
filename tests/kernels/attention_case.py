"""Batches for attention, with NaN in all memory that must not be read, and what their results may differ by.

Dimension letters: T tokens; N items; H query heads; K key-value heads; G = H / K; D width of a key; V width
of a value; S tokens a page; Q rows of an item; L positions of its context.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels import paged_attention as module
from kernels.attention_batch import AttentionBatch
from kernels.attention_scoring import Scoring
from kernels.packed_pages import LeadingValues
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import packed
from tests.kernels.tree_batches import Tree, with_trees

# For so many heads: a cap that most scores feel, sinks of no weight and of most of it, slopes as of BLOOM.
SCORINGS: dict[str, Callable[[int], Any]] = {
    "softcap": lambda heads: 1.5,
    "sinks": lambda heads: torch.tensor([-math.inf, *range(heads - 1)]).sub(1),
    "alibi_slopes": lambda heads: 2 ** (-8 * (torch.arange(heads) + 1.0) / heads),
}
# No model has both a cap and slopes, and no order is known for them.
FEATURES = [("softcap",), ("sinks",), ("alibi_slopes",), ("softcap", "sinks"), ("alibi_slopes", "sinks")]
# The CUDA kernels have no slopes: no model that runs on them does.
CAP_AND_SINKS = FEATURES[3]
# Who attends: torch, the kernels of the CPU, and the CUDA kernels: with the keys of a decode in one part,
# with units for three parts of each item, for more than are added up at once, and with the tiles for devices
# with less shared memory.
TORCH, COMPILED, TRITON, SPLIT = "torch", "compiled", "triton", "triton-split"
# Those of the CPU with pages of 8 bits.
QUANTISED = "compiled-quantised"
MANY_SPLITS, SMALL = "triton-splits", "triton-small"
_UNITS = {TRITON: 1, SPLIT: 3, MANY_SPLITS: 17}
# Scores of so many elements at a time, in float64: 1 GiB.
_SCORES = 1 << 27
# An item: its new tokens, and its context with them (0: a padding item). Or a tree, and the tokens before it.
Item = tuple[int | Tree, int]


@dataclass
class Case:
    """A batch in pages, and the same keys and values of each item without pages.

    Attributes:
        query: [T, H, D], a view of something wider, as the queries of the decoder are.
        k_pages: [pages, S, K, D].
        v_pages: [pages, S, K, V].
        batch: Rows and pages.
        keys: [L, K, D] for each item.
        values: [L, K, V] for each item.
        scoring: How scores become weights.
        trees: For each item its tree, or None.
    """

    query: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scoring: Scoring
    trees: list[Tree | None]

    def part(self, first: int, last: int, rows: slice = slice(None)) -> Case:
        """Items `first` to `last` alone; of a single item, some of its rows, which count as its last."""
        batch, starts = self.batch, self.batch.query_starts
        query_lens = list(batch.query_lens[first : last + 1])
        contexts = list(batch.context_lens_host[first : last + 1])
        begin = sum(batch.query_lens[:first])
        query = self.query[begin : begin + sum(query_lens)]
        if rows != slice(None):
            skipped, end, _ = rows.indices(query_lens[0])
            contexts, query_lens = [contexts[0] - query_lens[0] + end], [end - skipped]
        query_starts = [sum(query_lens[:item]) for item in range(len(query_lens) + 1)]
        mine = AttentionBatch(
            batch.page_tables[first : last + 1],
            torch.tensor(query_starts, dtype=starts.dtype, device=starts.device),
            torch.tensor(contexts, dtype=starts.dtype, device=starts.device),
            query_lens,
            contexts,
        )
        return replace(self, query=query[rows], batch=mine)

    def check(self, out: torch.Tensor, *, rounds_weights: bool = False, any_order: bool = False) -> None:
        """Compare a result [T, H, V] with float64, item by item.

        Allowed is twice what rounding the exact result costs, plus 1e-6 for the float32 accumulation, as in
        `assert_close`.

        With `rounds_weights`, a kernel rounds the weights of the softmax to the dtype of the values, as the
        tensor cores want it, but not their sum, by which they are divided. A weight is off by a factor of at
        most 1 +- u, where u is half the spacing of numbers at 1, and so the result by u times the same
        average of absolute values. Weights too small for that are off by half the smallest number, each; the
        sum of weights is at least 1.

        With `any_order`, there is one thing more in float32: what the sum of a score's D products costs,
        which shows among millions of results, and earlier if they are summed in an unlucky order, as torch
        may. In any order a sum of some of the products is at most |q| |k|, here about D. So D rounding errors
        of either sign add up to about sqrt(D) half units in the last place of |q| |k| scale, here about
        sqrt(D). A weight is off by as much, and the result by that times the average distance of values.
        """
        dtype, info = self.query.dtype, torch.finfo(self.query.dtype)
        width, value_width = self.k_pages.shape[3], self.v_pages.shape[3]
        assert (
            out.shape == (*self.query.shape[:2], value_width) and out.dtype is dtype and out.is_contiguous()
        )
        assert torch.isfinite(out).all(), "not finite"
        for item, rows in enumerate(torch.split(out, list(self.batch.query_lens))):
            if not len(rows) or not self.batch.context_lens_host[item]:
                assert not rows.any(), "a padding item is not zero"
                continue
            exact, average = self._attend64(item)
            allowed = 2 * ((exact.to(dtype).double() - exact).abs().max() + 1e-6)
            if dtype is not torch.float32 and rounds_weights:
                largest, length = self.values[item].abs().max(), len(self.values[item])
                allowed = (
                    allowed + info.eps / 2 * average + length * largest * info.smallest_normal * info.eps / 2
                )
            if dtype is torch.float32 and any_order:
                allowed = allowed + width * info.eps / 2 * (average + exact.abs())
            excess = ((rows.double() - exact).abs() - allowed).max().item()
            assert excess <= 0, f"item {item}: off by {excess} more than allowed"

    def _attend64(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of an item in float64, and the same average of the absolute values, [Q, H, V] each."""
        scoring = self.scoring
        begin = sum(self.batch.query_lens[:item])
        query = self.query[begin : begin + self.batch.query_lens[item]].double()  # [Q, H, D]
        seen, ahead = self._seen(item)
        group = query.shape[1] // self.k_pages.shape[2]
        exact = query.new_zeros(*query.shape[:2], self.v_pages.shape[3])
        average = exact.clone()
        for head in range(query.shape[1]):
            key, value = (dense[item][:, head // group].double() for dense in (self.keys, self.values))
            for rows in torch.split(torch.arange(len(query)), max(1, _SCORES // len(key))):
                scores = query[rows, head] @ key.T * scoring.scale  # [Q, L]
                if scoring.softcap is not None:
                    scores = scoring.softcap * (scores / scoring.softcap).tanh()
                if scoring.alibi_slopes is not None:
                    scores += scoring.alibi_slopes[head].double() * ahead[rows]
                scores.masked_fill_(~seen[rows], -math.inf)
                if scoring.sinks is not None:
                    sink = scoring.sinks[head].double().expand(len(rows), 1)
                    scores = torch.cat([scores, sink], 1)
                weights = scores.softmax(1)[:, : len(key)]
                exact[rows, head], average[rows, head] = weights @ value, weights @ value.abs()
        return exact, average

    def _seen(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which positions the rows of an item attend to, and by how much they are ahead, [Q, L] each."""
        context, query_len = self.batch.context_lens_host[item], self.batch.query_lens[item]
        tree, window = self.trees[item], self.scoring.sliding_window
        positions = torch.arange(context, device=self.query.device)
        if tree is None:
            ahead = positions - positions[context - query_len :, None]
            seen = ahead <= 0
        else:
            root, tokens = context - 1 - len(tree.parents), range(1 + len(tree.parents))
            depths = torch.tensor([len(tree.path(token)) - 1 for token in tokens])
            positions[root:] = root + depths.to(positions)
            ahead = positions - positions[context - query_len :, None]
            seen = torch.arange(context, device=positions.device).expand(query_len, -1) < root
            for row, token in enumerate(tokens[tree.computed :]):
                seen[row, [root + before for before in tree.path(token)]] = True
        return seen if window is None else seen & (ahead > -window), ahead


def make_case(
    items: Sequence[Item],
    device: torch.device | str = "cpu",
    *,
    group: int = 2,
    kv_heads: int = 2,
    width: int = 32,
    value_width: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    features: Sequence[str] = (),
    seed: int = 0,
    nan_before_window: bool = False,
    first_page: int = 1,
    eight_bits: bool = False,
) -> Case:
    """A batch in shuffled pages from `first_page` on. `features` are of SCORINGS.

    With `eight_bits` a key or value is exact in 8 bits: whole numbers up to 127 times a power of 2.

    NaN are: slots behind the end of an item; page 0, which all unused entries of the page tables name; and
    with `nan_before_window` the slots that no row of an item attends to, unless it is a tree.
    """
    trees = [item if isinstance(item, Tree) else None for item, _ in items]
    query_lens = [item.query_len if isinstance(item, Tree) else item for item, _ in items]
    contexts = [
        last + 1 + len(tree.parents) if tree else last for tree, (_, last) in zip(trees, items, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // page_size) for context in contexts]
    free = list(range(first_page, first_page + sum(needed)))
    random.Random(seed).shuffle(free)
    widths = (width, value_width or width)
    pages = [
        torch.full(
            (first_page + len(free) + 1, page_size, kv_heads, each), torch.nan, dtype=dtype, device=device
        )
        for each in widths
    ]
    tables = torch.zeros(len(items), max([*needed, 0]) + 2, dtype=torch.int32)
    dense: list[list[torch.Tensor]] = [[], []]
    for index, (tree, query_len, context) in enumerate(zip(trees, query_lens, contexts, strict=True)):
        owned = torch.tensor([free.pop() for _ in range(needed[index])], dtype=torch.int64)
        tables[index, : len(owned)] = owned
        oldest = 0
        if window is not None and nan_before_window and tree is None:
            oldest = max(0, context - query_len - window + 1)
        seen = torch.arange(oldest, context)
        for which in range(2):
            rows = torch.randn(context, kv_heads, widths[which], generator=generator).to(device, dtype)
            if eight_bits:
                rows = _in_eight_bits(rows)
            dense[which].append(rows)
            at = owned[seen // page_size].to(device), (seen % page_size).to(device)
            pages[which][at] = rows[oldest:]
    starts = [sum(query_lens[:item]) for item in range(len(items) + 1)]
    packed = torch.randn(starts[-1], (group + 2) * kv_heads, width, generator=generator).to(device, dtype)
    packed[:, group * kv_heads :] = torch.nan
    batch = AttentionBatch(
        page_tables=tables.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_lens=query_lens,
        context_lens_host=contexts,
    )
    if any(trees):
        batch = with_trees(batch, trees)
    told = {name: SCORINGS[name](group * kv_heads) for name in features}
    told |= {name: value.to(device) for name, value in told.items() if isinstance(value, torch.Tensor)}
    scoring = Scoring(width**-0.5, window, **told)
    query = packed[:, : group * kv_heads]
    return Case(query, pages[0], pages[1], batch, dense[0], dense[1], scoring, trees)


def _in_eight_bits(rows: torch.Tensor) -> torch.Tensor:
    """About these numbers [.., D]."""
    scales = 2.0 ** (rows.float().abs().amax(-1, keepdim=True) / 127).log2().ceil()
    codes = (rows.float() / scales).round().clamp(-127, 127)
    codes[..., 0] = 127 * codes[..., 0].sign() + 127 * (codes[..., 0] == 0)
    return (codes * scales).to(rows.dtype)


def attend(case: Case, backend: str, *, in_keys: bool = False) -> torch.Tensor:
    """The result of one of the backends above. With COMPILED, torch must not stand in for a kernel.

    `in_keys`: values are read where keys have them.
    """
    values = LeadingValues(case.k_pages, case.v_pages.shape[3]) if in_keys else case.v_pages
    tensors = case.query, case.k_pages, values, case.batch
    with pytest.MonkeyPatch.context() as patch:
        if backend.startswith(TRITON):
            from kernels.cuda import decode_attention, decode_plan
            from kernels.cuda import paged_attention as cuda
            from kernels.cuda.variant import SHARED_BYTES

            if backend in _UNITS:
                patch.setattr(cuda, "num_units_for", lambda items, *_: items * _UNITS[backend])
                patch.setattr(decode_plan, "MIN_PART_KEYS", 16)
                patch.setattr(decode_attention, "COMBINED", 128)
            if backend == SMALL:
                patch.setattr(cuda, "limits_of", lambda _: cuda.DeviceLimits(132, SHARED_BYTES[89]))
            return cuda.paged_attention(*tensors, case.scoring)
        told = {name: getattr(case.scoring, name) for name in Scoring.__dataclass_fields__}
        if backend == TORCH:
            return module.paged_attention(*tensors, **told)
        need_compiled()
        pages = packed(case.k_pages, case.v_pages, quantised=backend == QUANTISED)
        return module.paged_attention(case.query, *pages, case.batch, **told)
