"""Attention in plain torch, by blocks and by groups of items; and the last bit of the largest tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels import attention_reference as reference
from kernels.attention_trees import MAX_TREE_TOKENS, depths_and_ancestors, distances
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


def test_the_last_bit_is_a_bit() -> None:
    """It is the sign of the number."""
    depths, ancestors = depths_and_ancestors(range(MAX_TREE_TOKENS - 1))
    assert depths[-1] == 63 and ancestors[-1] == -1
    assert distances(torch.tensor(ancestors), 0, 0, 64)[-1].tolist() == list(range(-63, 1))
