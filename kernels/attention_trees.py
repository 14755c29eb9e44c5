r"""The token trees of a batch, and which tokens each of their tokens attends to.

The tokens of a tree are alternative continuations of a sequence. Their slots are consecutive, the root first,
and each token comes after its parent. The position of a token is the root's position plus its depth. A token
attends to the whole sequence before the root, and in the tree only to its own path from the root.

    slots      ... 40 41 | 42 43 44 45 46        42 -- 43 -- 45
    positions  ... 40 41 | 42 43 43 44 44          \-- 44 -- 46
    ancestors              1, 11, 101, 1011, 10101 (binary, the root's bit last)

Slots ascend along a path, so the bits also give distances: the distance from a token to one on its path is
the number of bits above that one's. GPUs would have to count bits for each pair of tokens, so they get the
depths.

Dimension letters: T tokens of the batch; N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.checks import INDEX_DTYPES, check_tensor

# The number of bits in an element of `ancestors`.
MAX_TREE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """The trees of a batch. Its other items are causal.

    Attributes:
        roots: [N] int32, the index of each tree's root among the slots of its sequence; an earlier step may
            have computed the root. For an item that is not a tree, its context length.
        ancestors: [T] int64, bit j: the row attends to slot root + j, its own included. 0: not a row of a
            tree.
        depths: [N, 64] int32, for each tree the depths of the tokens in slots root, root + 1 and so on.
        is_tree: Whether each item is a tree, on the host.
    """

    roots: torch.Tensor
    ancestors: torch.Tensor
    depths: torch.Tensor
    is_tree: Sequence[bool]

    def after(self, items: int) -> TokenTrees:
        """The trees of the batch without its first `items`, which have one token each and are not trees."""
        return TokenTrees(
            self.roots[items:], self.ancestors[items:], self.depths[items:], self.is_tree[items:]
        )

    def check(self, query_lens: Sequence[int]) -> None:
        """Check the fields for a batch of these items. Raises ValueError or TypeError."""
        check_tensor("roots", self.roots, (len(query_lens),), INDEX_DTYPES)
        check_tensor("ancestors", self.ancestors, (sum(query_lens),), (torch.int64,))
        check_tensor("depths", self.depths, (len(query_lens), MAX_TREE_TOKENS), INDEX_DTYPES)
        if len(self.is_tree) != len(query_lens):
            raise ValueError(f"is_tree: must have {len(query_lens)} entries, got {len(self.is_tree)}")
        for query_len, is_tree in zip(query_lens, self.is_tree, strict=True):
            if is_tree and query_len > MAX_TREE_TOKENS:
                raise ValueError(f"ancestors: a tree has {MAX_TREE_TOKENS} tokens at most, not {query_len}")


def depths_and_ancestors(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """The depth of each token of a tree, 0 for the root, and its `ancestors` as an int64.

    `parents`: for each token except the root the index of its parent, which is lower than its own.
    """
    depths, seen = [0], [1]
    for index, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        seen.append(seen[parent] | 1 << index)
    sign = 1 << (MAX_TREE_TOKENS - 1)
    return depths, [(bits ^ sign) - sign for bits in seen]


def distances(ancestors: torch.Tensor, root: int, first: int, end: int) -> torch.Tensor:
    """How far keys are ahead of the rows of one tree: at most 0 if the key is visible to the row, else 1.

    Args:
        ancestors: [Q], those of the rows.
        root: The tree's first slot.
        first: The slot of the first key, at most `root`.
        end: One past the slot of the last key, at most root + MAX_TREE_TOKENS.

    Returns:
        [Q, end - first] int64.
    """
    places = torch.arange(MAX_TREE_TOKENS, device=ancestors.device)
    sees = (ancestors[:, None] >> places) & 1  # [Q, 64]
    # For each token on the path of a row: how many tokens of the path come after it.
    later = sees.flip(1).cumsum(1).flip(1) - 1
    among = torch.where(sees.bool(), -later, 1)[:, : end - root]
    before = torch.arange(first, root, device=ancestors.device)
    own = root - 1 + sees.sum(1, keepdim=True)  # [Q, 1] positions
    return torch.cat([before - own, among], dim=1)
