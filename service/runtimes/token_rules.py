"""Which tokens may not follow in a sample, because of those that it has: early ends, and bad words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# As many further tokens as anybody asks about.
FOR_EVER = 1 << 32


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a sample may not choose, beside what its mask forbids.

    Attributes:
        min_tokens: The least number of its tokens before one of `end_ids` may follow.
        words: Sequences of tokens that do not occur in it. None is empty.
    """

    min_tokens: int
    end_ids: frozenset[int]
    words: tuple[tuple[int, ...], ...] = ()

    @property
    def num_before(self) -> int:
        """How many of a sample's last tokens decide about the next one."""
        return max(map(len, self.words), default=1) - 1

    def forbidden(self, num_tokens: int, last: Sequence[int]) -> frozenset[int]:
        """The tokens that may not follow. `last`: the last `num_before` of so many, or all there are."""
        known = tuple(last)
        ends = self.end_ids if num_tokens < self.min_tokens else ()
        return frozenset(ends).union(
            word[-1]
            for word in self.words
            if len(word) <= len(known) + 1 and word[:-1] == known[len(known) + 1 - len(word) :]
        )

    def stays_same(self, num_tokens: int) -> int:
        """For how many further tokens the same ones are forbidden, whatever is chosen."""
        if self.num_before:
            return 0
        return self.min_tokens - 1 - num_tokens if num_tokens < self.min_tokens else FOR_EVER


def token_rules(
    min_tokens: int, end_ids: frozenset[int], words: Iterable[Sequence[int]]
) -> TokenRules | None:
    """The rules. None: they would forbid nothing."""
    unique = tuple(sorted({tuple(word) for word in words if len(word)}))
    return TokenRules(min_tokens, end_ids, unique) if min_tokens or unique else None
