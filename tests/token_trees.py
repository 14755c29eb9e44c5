"""Trees of drafts for tests: random ones, and ones that are right for a while."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """Tokens, and of each but the first the index of the one that it follows."""

    token_ids: list[int]
    parents: list[int]

    def path(self, index: int) -> list[int]:
        """The tokens from the root to one, both included."""
        return [self.token_ids[at] for at in self.indexes(index)]

    def indexes(self, index: int) -> list[int]:
        """The same as indexes."""
        return [0] if index == 0 else [*self.indexes(self.parents[index - 1]), index]


def random_tree(
    dice: random.Random, root: int, size: int, vocab: int, truth: Callable[[Sequence[int]], int] | None = None
) -> Tree:
    """A tree of `size` tokens. Where `truth` says what follows a path, that is often among the children."""
    tree = Tree([root], [])
    reach = dice.choice([1, 3, size])
    for index in range(size - 1):
        parent = dice.randint(max(0, index - reach), index)
        token = dice.randrange(vocab)
        if truth is not None and dice.random() < 0.6:
            token = truth(tree.path(parent))
        tree.token_ids.append(token)
        tree.parents.append(parent)
    return tree
