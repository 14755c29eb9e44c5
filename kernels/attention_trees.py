r"""Which new tokens of a batch are trees, and what each of them sees.

The tokens of a tree are alternatives for how a sequence goes on. They lie in slots one behind the other, the
root first and each behind the token that it follows; but a token's position is its depth behind the root's,
and of the tree it sees its own path only. It does see all of the sequence before the root.

    slots      ... 40 41 | 42 43 44 45 46        42 -- 43 -- 45
    positions  ... 40 41 | 42 43 43 44 44          \-- 44 -- 46
    ancestors              1, 11, 101, 1011, 10101 (binary, the root's bit last)

As slots ascend along a path, the bits say depths too: between a token and one that it sees lie as many
positions as its path has tokens from that one on, less one. GPUs, which would count bits for each pair of
tokens, are told the depths.

Dimension letters: T tokens of the batch; N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.checks import INDEX_DTYPES, check_tensor

# Bits of a number of `ancestors`.
MAX_TREE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """The trees of a batch. Its other items are causal, as ever.

    Attributes:
        roots: [N] int32, the index in its sequence's slots of each tree's root, which an earlier step may
            have computed; of an item that is no tree its context length.
        ancestors: [T] int64, bit j: the row sees slot root + j, its own included. 0: the row is of no tree.
        depths: [N, 64] int32, of each tree those of the tokens in slots root, root + 1 and so on.
        is_tree: N of them, on the host.
    """

    roots: torch.Tensor
    ancestors: torch.Tensor
    depths: torch.Tensor
    is_tree: Sequence[bool]

    def check(self, query_lens: Sequence[int]) -> None:
        """Check it for a batch of these items. Raises ValueError or TypeError, by name."""
        check_tensor("roots", self.roots, (len(query_lens),), INDEX_DTYPES)
        check_tensor("ancestors", self.ancestors, (sum(query_lens),), (torch.int64,))
        check_tensor("depths", self.depths, (len(query_lens), MAX_TREE_TOKENS), INDEX_DTYPES)
        if len(self.is_tree) != len(query_lens):
            raise ValueError(f"is_tree: must have {len(query_lens)} entries, got {len(self.is_tree)}")
        for query_len, is_tree in zip(query_lens, self.is_tree, strict=True):
            if is_tree and query_len > MAX_TREE_TOKENS:
                raise ValueError(f"ancestors: a tree has {MAX_TREE_TOKENS} tokens at most, not {query_len}")


def depths_and_ancestors(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each token of a tree its depth, the root's 0, and its `ancestors` as an int64.

    parents: of each token but the root the index of the one that it follows, which comes before it.
    """
    depths, seen = [0], [1]
    for index, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        seen.append(seen[parent] | 1 << index)
    sign = 1 << (MAX_TREE_TOKENS - 1)
    return depths, [(bits ^ sign) - sign for bits in seen]


def distances(ancestors: torch.Tensor, root: int, first: int, end: int) -> torch.Tensor:
    """How far keys are ahead of the rows of one tree: never above 0 where a row sees a key, else 1.

    Args:
        ancestors: [Q] those of the rows.
        root: The tree's first slot.
        first: The slot of the first key, at most `root`.
        end: The slot behind the last key, at most MAX_TREE_TOKENS behind `root`.

    Returns:
        [Q, end - first] int64.
    """
    places = torch.arange(MAX_TREE_TOKENS, device=ancestors.device)
    sees = (ancestors[:, None] >> places) & 1  # [Q, 64]
    # Of the tokens that a row sees: how many come later on its path.
    later = sees.flip(1).cumsum(1).flip(1) - 1
    among = torch.where(sees.bool(), -later, 1)[:, : end - root]
    before = torch.arange(first, root, device=ancestors.device)
    own = root - 1 + sees.sum(1, keepdim=True)  # [Q, 1] positions
    return torch.cat([before - own, among], dim=1)
