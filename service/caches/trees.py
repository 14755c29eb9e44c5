"""Trees of drafts, of which a cache keeps one path. Mirrors `workers/token_trees.py`."""

from __future__ import annotations

from collections.abc import Sequence


def path_of(token_ids: Sequence[int], parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """The indexes of the tokens of a tree that a cache kept, which are `kept`: of equal siblings the first.

    parents: of each token but the first the index of the one that it follows.
    """
    path = [0]
    for token in kept[1:]:
        path.append(
            next(
                index
                for index, parent in enumerate(parents, start=1)
                if parent == path[-1] and token_ids[index] == token
            )
        )
    return path
