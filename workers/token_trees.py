"""Trees of drafts: alternatives for how a sequence goes on, of which one path is kept.

A tree is the list of its tokens and, of each but the first, the *parent*: the index of the token that it
follows, which comes before it. Plain data; what attention makes of it is in kernels/attention_trees.py.
"""

from __future__ import annotations

from collections.abc import Sequence


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Of each token the indexes of those that follow it, ascending."""
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
    """The path that is kept: from the root on, each time the first child that is the token chosen there.

    chosen: of each token of the tree what follows it.
    """
    children = children_of(parents)
    path = [0]
    while True:
        right = (child for child in children[path[-1]] if token_ids[child] == chosen[path[-1]])
        following = next(right, None)
        if following is None:
            return path
        path.append(following)
