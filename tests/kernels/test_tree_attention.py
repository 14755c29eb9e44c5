"""Attention of token trees against float64: each token as if its path was all there is."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.attention_trees import MAX_TREE_TOKENS, TokenTrees, depths_and_ancestors, distances
from kernels.cpu import library
from kernels.cpu import paged_attention as cpu
from tests.kernels.attention_features import FEATURES
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.references import assert_close
from tests.kernels.test_paged_attention import Case, make_case
from tests.kernels.tree_batches import Tree, random_tree, tree_attention64, with_trees

torch.set_num_threads(1)

DEPTHS = torch.zeros(1, MAX_TREE_TOKENS, dtype=torch.int32)


@pytest.fixture(params=["compiled", "reference"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who attends: the compiled kernels where they are, or torch."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "can_attend", lambda *_: False)
    else:
        need_compiled()
    return str(request.param)


def check(items: list[tuple[Tree | tuple[int, int], int]], window: int | None, **shape: object) -> Case:
    """Items are a tree or (new tokens, 0), and the tokens before."""
    trees = [item if isinstance(item, Tree) else None for item, _ in items]
    lengths = []
    for item, before in items:
        new = item.query_len if isinstance(item, Tree) else item[0]
        computed = item.computed if isinstance(item, Tree) else 0
        lengths.append((new, before + computed + new))
    case = make_case(lengths, **shape)  # type: ignore[arg-type]
    case.batch = with_trees(case.batch, trees)
    exact = tree_attention64(
        case.query, case.keys, case.values, case.batch, trees, scale=0.3, window=window, scoring=case.scoring
    )
    assert_close(case.run(window), exact)
    return case


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize("window", [None, 1, 3, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_trees_beside_chains(dtype: torch.dtype, window: int | None, features: list[str]) -> None:
    dice = random.Random(f"{window}{features}")
    items: list[tuple[Tree | tuple[int, int], int]] = [((1, 0), 30), ((20, 0), 7)]
    sizes = (2, 5, 16, 17, 40, 64)
    items += [(random_tree(dice, tokens), dice.choice([0, 1, 15, 16, 17, 70])) for tokens in sizes]
    check(items, window, dtype=dtype, features=features, heads=6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("before", [0, 1, 15, 16, 500, 511, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tree_in_parts(dtype: torch.dtype, before: int) -> None:
    """Tokens of a tree that steps before have computed are seen as those of the same step are."""
    dice = random.Random(before)
    trees = [random_tree(dice, tokens, dice.randint(1, tokens - 1)) for tokens in (2, 9, 33, 64)]
    check([(tree, before) for tree in trees], None, dtype=dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (80, 64), (256, 16)])
def test_keys_and_values_of_different_widths(width: int, value_width: int) -> None:
    dice = random.Random(width)
    items = [(random_tree(dice, tokens), 20) for tokens in (7, 30)]
    check([*items], None, width=width, value_width=value_width, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 16, 40])
def test_a_chain_that_is_said_to_be_a_tree(tokens: int, dtype: torch.dtype) -> None:
    """It is attended as one that is not, to the bit, where the same kernel does."""
    case = make_case([(tokens, tokens + 25)], dtype=dtype)
    plain = case.run()
    case.batch = with_trees(case.batch, [Tree(tuple(range(tokens - 1)))])
    if library.available() and (tokens <= 16 or dtype is torch.bfloat16):
        assert torch.equal(case.run(), plain)
    else:
        torch.testing.assert_close(case.run(), plain)


@pytest.mark.parametrize("features", [[], *FEATURES], ids="+".join)
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_others_are_the_same_to_the_bit_beside_a_tree(
    dtype: torch.dtype, window: int | None, features: list[str]
) -> None:
    """Whatever a batch holds, a chain comes out as in any other."""
    tree = random_tree(random.Random(1), 9)
    items = [(1, 60), (5, 40), (33, 70), (tree.query_len, 30)]
    case = make_case(items, dtype=dtype, features=features)
    plain = case.run(window)
    case.batch = with_trees(case.batch, [None, None, None, tree])
    assert torch.equal(case.run(window)[:39], plain[:39])


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
    found = distances(torch.tensor(ancestors), 0, 0, 64)
    assert found[-1].tolist() == list(range(-63, 1))


def test_what_does_not_fit_is_refused() -> None:
    case = make_case([(3, 5)])
    with pytest.raises(ValueError, match="ancestors"):
        with_trees(case.batch, [Tree((0, 1))]).trees.check([4])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is_tree"):
        TokenTrees(torch.tensor([0]), torch.tensor([1]), DEPTHS, []).check([1])
    with pytest.raises(ValueError, match="64 tokens"):
        TokenTrees(torch.tensor([0]), torch.ones(65, dtype=torch.int64), DEPTHS, [True]).check([65])
