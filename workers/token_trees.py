"""Trees of drafts: alternative continuations of a sequence, of which one path is kept.

A tree is a list of tokens and, for each but the first, its *parent*: the index of the token it follows, which
is before it in the list. For attention over trees see kernels/attention_trees.py.
"""

from __future__ import annotations

from collections.abc import Sequence


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """For each token the indexes of its children, ascending."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for index, parent in enumerate(parents, start=1):
        children[parent].append(index)
    return children


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """The indexes from the root to a token, both included."""
    path = [index]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def kept_path(token_ids: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The kept path: from the root on, always the first child that equals the chosen token.

    chosen: for each token of the tree, the token that the model chose after it.
    """
    children = children_of(parents)
    path = [0]
    while True:
        matches = (child for child in children[path[-1]] if token_ids[child] == chosen[path[-1]])
        child = next(matches, None)
        if child is None:
            return path
        path.append(child)
