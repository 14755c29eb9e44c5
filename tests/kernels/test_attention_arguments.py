"""Attention in plain torch by blocks and groups, the numbers of trees, and arguments that are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels import attention_reference as reference
from kernels.attention_batch import AttentionBatch
from kernels.attention_trees import MAX_TREE_TOKENS, TokenTrees, depths_and_ancestors, distances
from kernels.packed_pages import PackedValues, can_pack
from kernels.paged_attention import paged_attention
from tests.kernels.attention_case import FEATURES, TORCH, attend, make_case
from workers.kv.tensors import KvTensors, LayerKv


@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [
        (40, 40, torch.float32),
        (592, 592, torch.bfloat16),
        (64, 64, torch.float16),
        (24, 16, torch.float32),
        (16, 24, torch.float32),
    ],
)
def test_other_shapes_and_dtypes_are_left_to_torch(width: int, value_width: int, dtype: torch.dtype) -> None:
    kv = KvTensors([LayerKv(2, width, value_width)], num_pages=2, page_size=16, dtype=dtype)
    assert all(isinstance(pages, torch.Tensor) for pages in kv.layer(0))
    case = make_case([(1, 20), (3, 18)], width=width, value_width=value_width, dtype=dtype)
    out = paged_attention(case.query, case.k_pages, case.v_pages, case.batch, scale=case.scoring.scale)
    case.check(out, any_order=True)


@pytest.mark.parametrize("features", [(), *FEATURES], ids="+".join)
def test_the_reference_in_blocks_and_groups(features: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks go block by block, which must meet; items that are too large for a group go one by one."""
    for window in (None, 9):
        with monkeypatch.context() as patch:
            patch.setattr(reference, "QUERY_BLOCK_TOKENS", 7)
            patch.setattr(reference, "MASK_ELEMENTS", 700)
            case = make_case([(50, 70), (40, 40)], features=features, window=window)
            case.check(attend(case, TORCH), any_order=True)
    case = make_case([(1, length) for length in (30, 31, 33, 64, 65, 90)], features=features)
    for scratch_bytes in (reference.GROUP_SCRATCH_BYTES, 1):
        monkeypatch.setattr(reference, "GROUP_SCRATCH_BYTES", scratch_bytes)
        case.check(attend(case, TORCH), any_order=True)


def test_memory_of_a_group_is_bounded() -> None:
    groups = list(reference._groups([1] * 40, [100] * 40, 1000))
    assert sorted(item for group in groups for item in group.items) == list(range(40))
    assert max(len(group.items) * max(group.contexts) for group in groups) <= 1000


def test_the_numbers_of_a_tree() -> None:
    depths, ancestors = depths_and_ancestors([0, 0, 1, 2])
    assert depths == [0, 1, 1, 2, 2]
    assert ancestors == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    found = distances(torch.tensor(ancestors), 42, 40, 47)
    assert found.tolist() == [
        [-2, -1, 0, 1, 1, 1, 1],
        [-3, -2, -1, 0, 1, 1, 1],
        [-3, -2, -1, 1, 0, 1, 1],
        [-4, -3, -2, -1, 1, 0, 1],
        [-4, -3, -2, 1, -1, 1, 0],
    ]


def test_the_last_bit_is_a_bit() -> None:
    """It is the sign of the number."""
    depths, ancestors = depths_and_ancestors(range(MAX_TREE_TOKENS - 1))
    assert depths[-1] == 63 and ancestors[-1] == -1
    assert distances(torch.tensor(ancestors), 0, 0, 64)[-1].tolist() == list(range(-63, 1))


def test_wrong_arguments_are_named() -> None:
    case = make_case([(1, 20), (3, 18)])
    query, k_pages, v_pages, batch = case.query, case.k_pages, case.v_pages, case.batch
    tables, starts, lens = batch.page_tables, batch.query_starts, batch.context_lens

    def run(query: torch.Tensor = query, k_pages: torch.Tensor = k_pages, **told: Any) -> None:
        paged_attention(query, k_pages, **{"v_pages": v_pages, "batch": batch, "scale": 1.0, **told})

    with pytest.raises(ValueError, match="query: shape"):
        run(query[:3])
    with pytest.raises(ValueError, match="k_pages: shape"):
        run(query, k_pages[..., :16])
    with pytest.raises(ValueError, match="v_pages: shape"):
        run(v_pages=v_pages[1:])
    with pytest.raises(ValueError, match="query: 3 heads are not a multiple of the 2 heads"):
        run(query[:, :3])
    if can_pack(v_pages):
        with pytest.raises(TypeError, match="v_pages: must be packed and quantised if k_pages are"):
            run(v_pages=PackedValues(v_pages))
    with pytest.raises(TypeError, match="k_pages: must have the dtype"):
        run(query, k_pages.half())
    with pytest.raises(ValueError, match="page_tables: must hold 20 positions, got 16"):
        run(batch=AttentionBatch(tables[:, :1], starts, lens, [1, 3], [20, 18]))
    with pytest.raises(ValueError, match="sliding_window"):
        run(sliding_window=0)
    for softcap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softcap: must be positive and finite"):
            run(softcap=softcap)
    with pytest.raises(ValueError, match="softcap: no order is known for it and alibi_slopes"):
        run(softcap=1.0, alibi_slopes=torch.zeros(4))
    with pytest.raises(ValueError, match=r"sinks: shape must be \[4\], got \[3\]"):
        run(sinks=torch.zeros(3))
    with pytest.raises(TypeError, match="alibi_slopes: dtype"):
        run(alibi_slopes=torch.zeros(4).half())
    with pytest.raises(TypeError, match="sinks: must be on the device of query"):
        run(sinks=torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="query_starts: shape"):
        AttentionBatch(tables, starts[:2], lens, [1, 3], [20, 18])
    with pytest.raises(ValueError, match="context_lens_host: item 1 has 2 for 3 new tokens"):
        AttentionBatch(tables, starts, lens, [1, 3], [20, 2])
    with pytest.raises(ValueError, match="query_lens: must not be negative"):
        AttentionBatch(tables, starts, lens, [1, -3], [20, 2])
    with pytest.raises(ValueError, match="context_lens_host: must have 2 entries"):
        AttentionBatch(tables, starts, lens, [1, 3], [20])


@pytest.mark.parametrize(
    ("rows", "is_tree", "lengths", "message"),
    [(3, [True], [4], "ancestors: shape"), (1, [], [1], "is_tree"), (65, [True], [65], "64 tokens")],
)
def test_trees_that_do_not_fit_are_refused(
    rows: int, is_tree: list[bool], lengths: list[int], message: str
) -> None:
    depths = torch.zeros(1, MAX_TREE_TOKENS, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        TokenTrees(torch.tensor([0]), torch.ones(rows, dtype=torch.int64), depths, is_tree).check(lengths)
