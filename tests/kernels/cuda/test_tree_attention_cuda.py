"""Attention of token trees against float64, with NaN in all memory that must not be read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kernels.cuda import paged_attention as module
from tests.kernels.attention_features import FEATURES
from tests.kernels.cuda.attention_case import AttentionCase, make_case
from tests.kernels.tree_batches import Tree, random_tree, tree_attention64, with_trees

torch.set_num_threads(1)

BOTH_TILES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class TreeCase(AttentionCase):
    """A batch in which some items are trees."""

    trees: Sequence[Tree | None]

    def _exact(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        features = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self.features.items()
        }
        return tree_attention64(
            self.query.cpu(),
            self.keys,
            values,
            self.batch,
            self.trees,
            scale=self.scale,
            window=self.window,
            scoring=features,
        )


def tree_case(items: Sequence[tuple[Tree | int, int]], device: str, **shape: object) -> TreeCase:
    """Items are a tree or so many new tokens, and the tokens before."""
    trees = [item if isinstance(item, Tree) else None for item, _ in items]
    lengths = []
    for item, before in items:
        new = item.query_len if isinstance(item, Tree) else item
        computed = item.computed if isinstance(item, Tree) else 0
        lengths.append((new, before + computed + new))
    plain = make_case(lengths, device, **shape)  # type: ignore[arg-type]
    fields = {name: getattr(plain, name) for name in AttentionCase.__dataclass_fields__}
    case = TreeCase(**fields)
    case.batch, case.trees = with_trees(case.batch, trees), trees
    return case


def check(case: TreeCase) -> None:
    out = case.new_out()
    out[: len(case.query)] = module.paged_attention(
        case.query,
        case.k_pages,
        case.v_pages,
        case.batch,
        scale=case.scale,
        sliding_window=case.window,
        **case.features,
    )
    case.check(out)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("before", [0, 1, 17, 63, 70])
@BOTH_TILES
def test_trees_that_start_anywhere(dtype: torch.dtype, before: int, window: int | None, device: str) -> None:
    dice = random.Random(before)
    items = [(random_tree(dice, tokens), before) for tokens in (2, 7, 33, 64)]
    # NaN in slots that no row sees is the business of tests without trees: a window may end within one.
    check(tree_case(items, device, dtype=dtype, window=window))


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
@pytest.mark.parametrize("window", [None, 20])
@BOTH_TILES
def test_features(dtype: torch.dtype, window: int | None, features: list[str], device: str) -> None:
    dice = random.Random(7)
    items: list[tuple[Tree | int, int]] = [(random_tree(dice, tokens), 20) for tokens in (7, 20)]
    check(
        tree_case(
            [(1, 30), *items, (9, 13), (5, -5)],
            device,
            group=3,
            kv_heads=2,
            dtype=dtype,
            window=window,
            features=features,
        )
    )


@BOTH_TILES
def test_trees_in_parts_beside_decodes_and_chunks(dtype: torch.dtype, device: str) -> None:
    """A part may be of a single token, which is no decode."""
    dice = random.Random(3)
    parts = [random_tree(dice, 9, 8), random_tree(dice, 64, 30), random_tree(dice, 64, 63)]
    items: list[tuple[Tree | int, int]] = [(1, 20), (1, 0), *((part, 20) for part in parts), (1, 60), (40, 3)]
    check(tree_case(items, device, kv_heads=2, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 8, 20])
@BOTH_TILES
def test_groups(group: int, dtype: torch.dtype, device: str) -> None:
    dice = random.Random(group)
    check(tree_case([(random_tree(dice, 20), 17), (9, 5)], device, group=group, dtype=dtype))
