"""Token trees for the tests of attention and of the worker."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_trees import MAX_TREE_TOKENS, TokenTrees, depths_and_ancestors


@dataclass(frozen=True)
class Tree:
    """A tree of which `computed` tokens are in the pages from steps before. `parents` as in requests."""

    parents: tuple[int, ...]
    computed: int = 0

    @property
    def query_len(self) -> int:
        """Tokens of this step."""
        return 1 + len(self.parents) - self.computed

    def path(self, index: int) -> list[int]:
        """The indexes from the root to a token."""
        return [0] if index == 0 else [*self.path(self.parents[index - 1]), index]


def random_tree(dice: random.Random, tokens: int, computed: int = 0) -> Tree:
    """Some are almost chains, others bushes."""
    reach = dice.choice([1, 2, 4, tokens])
    parents = tuple(dice.randint(max(0, index - reach), index) for index in range(tokens - 1))
    return Tree(parents, computed)


def with_trees(batch: AttentionBatch, trees: Sequence[Tree | None]) -> AttentionBatch:
    """The same batch, in which some items are trees. Their contexts end with the tree."""
    roots, ancestors = [], []
    # Where no token is, they mean nothing.
    depths = torch.full((len(trees), MAX_TREE_TOKENS), -1 << 20, dtype=torch.int32)
    for item, tree in enumerate(trees):
        query_len, context = batch.query_lens[item], batch.context_lens_host[item]
        if tree is None:
            roots.append(context)
            ancestors += [0] * query_len
        else:
            assert query_len == tree.query_len
            roots.append(context - 1 - len(tree.parents))
            deep, seen = depths_and_ancestors(tree.parents)
            ancestors += seen[tree.computed :]
            depths[item, : len(deep)] = torch.tensor(deep)
    device = batch.query_starts.device
    made = TokenTrees(
        torch.tensor(roots, dtype=torch.int32, device=device),
        torch.tensor(ancestors, dtype=torch.int64, device=device),
        depths.to(device),
        [tree is not None for tree in trees],
    )
    return dataclasses.replace(batch, trees=made)
