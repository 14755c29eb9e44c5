"""Paged attention against float64, with NaN in every slot that holds no token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention_reference as module
from kernels.attention_batch import AttentionBatch
from kernels.paged_attention import paged_attention
from tests.kernels.attention_features import FEATURES, SCORINGS
from tests.kernels.references import assert_close, attention64

torch.set_num_threads(1)

PAGE_SIZE = 16
ITEMS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 60)).map(lambda item: (item[0], item[0] + item[1])),
    min_size=1,
    max_size=6,
)


@dataclass
class Case:
    """A batch in pages, the same keys and values dense, and what else `paged_attention` is told."""

    query: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scoring: dict[str, Any] = field(default_factory=dict)

    def run(self, window: int | None = None, scale: float = 0.3) -> torch.Tensor:
        return paged_attention(
            self.query,
            self.k_pages,
            self.v_pages,
            self.batch,
            scale=scale,
            sliding_window=window,
            **self.scoring,
        )

    def check(self, window: int | None = None, scale: float = 0.3) -> torch.Tensor:
        """Run it and compare; returns the result."""
        actual = self.run(window, scale)
        lengths = self.batch.query_lens
        exact = attention64(self.query, self.keys, self.values, lengths, scale, window, **self.scoring)
        if len(actual):
            assert_close(actual, exact)
        return actual


def make_case(
    items: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 32,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    features: Sequence[str] = (),
) -> Case:
    """A batch of (query_len, context_len) items in shuffled pages; all other memory is NaN or infinite.

    `features` are of SCORINGS.
    """
    shuffle = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // PAGE_SIZE) for _, context in items]
    free = list(range(1, sum(needed) + 4))  # page 0 is what unused table entries name
    shuffle.shuffle(free)
    widths = (width, value_width or width)
    shapes = [(len(free) + 1, PAGE_SIZE, kv_heads, each) for each in widths]
    pages = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
    pages[0][0], pages[1][0] = float("inf"), float("-inf")
    tables = torch.zeros(len(items), max([*needed, 1]) + 2, dtype=torch.int32)
    dense: list[list[torch.Tensor]] = [[], []]
    for index, (_, context) in enumerate(items):
        owned = [free.pop() for _ in range(needed[index])]
        tables[index, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        for which in range(2):
            rows = torch.randn(context, kv_heads, widths[which], generator=generator).to(dtype)
            dense[which].append(rows)
            for position in range(context):
                pages[which][owned[position // PAGE_SIZE], position % PAGE_SIZE] = rows[position]
    query_lens = [query_len for query_len, _ in items]
    starts = [sum(query_lens[:i]) for i in range(len(items) + 1)]
    contexts = [context for _, context in items]
    # A view into something wider, as the queries of the decoder are.
    packed = torch.randn(starts[-1], heads + kv_heads, width, generator=generator).to(dtype)
    batch = AttentionBatch(
        page_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_lens=query_lens,
        context_lens_host=contexts,
    )
    scoring = {name: SCORINGS[name](heads) for name in features}
    return Case(packed[:, :heads], pages[0], pages[1], batch, dense[0], dense[1], scoring)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40])
def test_decodes_of_every_length_around_a_page(window: int | None) -> None:
    make_case([(1, length) for length in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100)]).check(window)


@pytest.mark.parametrize("window", [None, 5, 16, 33])
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 40])
def test_chunks_that_start_anywhere(start: int, window: int | None) -> None:
    make_case([(length, start + length) for length in (1, 15, 16, 17, 33)]).check(window)


@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_shapes(group_size: int, width: int, dtype: torch.dtype) -> None:
    case = make_case(
        [(1, 20), (1, 33), (3, 18), (3, 30), (20, 35)],
        heads=2 * group_size,
        kv_heads=2,
        width=width,
        dtype=dtype,
        seed=group_size,
    )
    case.check(scale=width**-0.5)


@given(
    items=ITEMS,
    window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_mixed_batch(items: list[tuple[int, int]], window: int | None, seed: int) -> None:
    make_case(items, heads=2, kv_heads=1, width=16, seed=seed).check(window)


@pytest.mark.parametrize("window", [None, 1, 16, 17])
@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features(dtype: torch.dtype, features: list[str], window: int | None) -> None:
    items = [*((1, length) for length in (1, 15, 16, 17, 40, 100)), (3, 18), (5, 5), (20, 35), (40, 90)]
    make_case(items, dtype=dtype, features=features).check(window)


@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize(("width", "value_width"), [(24, 16), (16, 24), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_of_different_widths(
    dtype: torch.dtype, width: int, value_width: int, features: list[str]
) -> None:
    items = [(1, 20), (1, 33), (3, 18), (1, 0), (20, 35)]
    case = make_case(items, width=width, value_width=value_width, dtype=dtype, features=features)
    out = case.check(scale=width**-0.5)
    assert out.shape == (len(case.query), 4, value_width) and out.is_contiguous()


@given(
    items=ITEMS,
    window=st.none() | st.integers(1, 50),
    features=st.sampled_from(FEATURES),
    group_size=st.sampled_from([1, 2, 3, 8]),
    widths=st.sampled_from([(16, 16), (24, 24), (32, 16), (24, 40)]),  # half of them are left to torch
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_mixed_batch_with_features(
    items: list[tuple[int, int]],
    window: int | None,
    features: list[str],
    group_size: int,
    widths: tuple[int, int],
    seed: int,
) -> None:
    case = make_case(
        items,
        heads=group_size,
        kv_heads=1,
        width=widths[0],
        value_width=widths[1],
        seed=seed,
        features=features,
    )
    case.check(window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_among_scores_of_any_size(dtype: torch.dtype) -> None:
    """Thousands above or below all scores: everything or nothing is left for the keys, and no NaN."""
    case = make_case([(1, 40), (5, 600), (40, 40)], heads=2, kv_heads=1, dtype=dtype)
    case.scoring = {"sinks": torch.tensor([-5000.0, 5000.0])}
    assert not case.check()[:, 1].any()
    case.query.mul_(1000)
    case.check()


def test_a_cap_bounds_scores_of_any_size() -> None:
    """Scores of thousands are as good as equal to the cap: keys count by their sign alone."""
    case = make_case([(1, 40), (5, 40), (20, 40)], features=["softcap"])
    case.query.mul_(1e6)
    case.check()


def test_padded_items_come_out_as_zeros() -> None:
    case = make_case([(1, 0), (1, 18), (1, 0)], features=["sinks"])
    out = case.check()
    assert not out[0].any() and not out[2].any() and out[1].any()


def test_nothing_to_do() -> None:
    assert make_case([(0, 0), (0, 5)]).check().shape == (0, 4, 32)


def test_queries_are_split_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks go block by block; the blocks must meet without a seam."""
    monkeypatch.setattr(module, "QUERY_BLOCK_TOKENS", 7)
    monkeypatch.setattr(module, "MASK_ELEMENTS", 700)
    for window in (None, 9):
        for features in [[], *FEATURES]:
            make_case([(50, 70), (40, 40)], features=features).check(window)


def test_an_item_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped with others, or too large to be grouped: each is as close to the exact answer."""
    items = [(1, length) for length in (30, 31, 33, 64, 65, 90)]
    for scratch_bytes in (module.GROUP_SCRATCH_BYTES, 1):
        monkeypatch.setattr(module, "GROUP_SCRATCH_BYTES", scratch_bytes)
        for features in [[], *FEATURES]:
            make_case(items, features=features).check()


def test_memory_of_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = list(module._groups([1] * 40, [100] * 40, 1000))
    assert sorted(item for group in groups for item in group.items) == list(range(40))
    assert max(len(group.items) * max(group.contexts) for group in groups) <= 1000


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(1, 40), (5, 40)])
    case.query.mul_(1000)
    out = paged_attention(case.query, case.k_pages, case.v_pages, case.batch, scale=1.0)
    assert torch.isfinite(out).all()


def test_wrong_arguments_are_named() -> None:
    case = make_case([(1, 20), (3, 18)])
    tables = case.batch.page_tables
    starts, lens = case.batch.query_starts, case.batch.context_lens

    def run(query: torch.Tensor, k_pages: torch.Tensor, batch: AttentionBatch = case.batch) -> None:
        paged_attention(query, k_pages, case.v_pages, batch, scale=1.0)

    with pytest.raises(ValueError, match="query: shape"):
        run(case.query[:3], case.k_pages)
    with pytest.raises(ValueError, match="k_pages: shape"):
        run(case.query, case.k_pages[..., :16])
    with pytest.raises(ValueError, match="query: 3 heads are not a multiple of the 2 heads"):
        run(case.query[:, :3], case.k_pages)
    with pytest.raises(TypeError, match="k_pages: must have the dtype"):
        run(case.query, case.k_pages.half())
    with pytest.raises(ValueError, match="page_tables: must hold 20 positions, got 16"):
        run(case.query, case.k_pages, AttentionBatch(tables[:, :1], starts, lens, [1, 3], [20, 18]))
    with pytest.raises(ValueError, match="query_starts: shape"):
        AttentionBatch(tables, starts[:2], lens, [1, 3], [20, 18])
    with pytest.raises(ValueError, match="context_lens_host: item 1 has 2 for 3 new tokens"):
        AttentionBatch(tables, starts, lens, [1, 3], [20, 2])
    with pytest.raises(ValueError, match="query_lens: must not be negative"):
        AttentionBatch(tables, starts, lens, [1, -3], [20, 2])
    with pytest.raises(ValueError, match="context_lens_host: must have 2 entries"):
        AttentionBatch(tables, starts, lens, [1, 3], [20])
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(case.query, case.k_pages, case.v_pages, case.batch, scale=1.0, sliding_window=0)

    def told(**scoring: Any) -> None:
        paged_attention(case.query, case.k_pages, case.v_pages, case.batch, scale=1.0, **scoring)

    for softcap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softcap: must be positive and finite"):
            told(softcap=softcap)
    with pytest.raises(ValueError, match="softcap: no order is known for it and alibi_slopes"):
        told(softcap=1.0, alibi_slopes=torch.zeros(4))
    with pytest.raises(ValueError, match=r"sinks: shape must be \[4\], got \[3\]"):
        told(sinks=torch.zeros(3))
    with pytest.raises(TypeError, match="alibi_slopes: dtype"):
        told(alibi_slopes=torch.zeros(4).half())
    with pytest.raises(TypeError, match="sinks: must be on the device of query"):
        told(sinks=torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="v_pages: shape"):
        paged_attention(case.query, case.k_pages, case.v_pages[1:], case.batch, scale=1.0)
