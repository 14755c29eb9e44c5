"""Which tokens may not follow in a sample, because of those that it has: early ends, and bad words. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# As many further tokens as anybody asks about.
FOR_EVER = 1 << 32
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The tokens that a sample may not choose, beside those that its mask forbids.

    Attributes:
        min_tokens: The least number of its tokens before one of `end_ids` may follow.
        words: Sequences of tokens that do not occur in it: the tokens before the last one, as 32-bit numbers,
            and the last. In bytes they are compared at once: there may be hundreds of a thousand tokens.
    """

    min_tokens: int
    end_ids: frozenset[int]
    words: tuple[tuple[bytes, int], ...] = ()

    @property
    def num_before(self) -> int:
        """How many of a sample's last tokens decide about the next one."""
        return max((len(before) for before, _ in self.words), default=0) // _TOKEN_BYTES

    def forbidden(self, num_tokens: int, last: Sequence[int]) -> frozenset[int]:
        """The tokens that may not follow. `last`: the last `num_before` of so many, or all there are."""
        known = array("I", last).tobytes()
        ends = self.end_ids if num_tokens < self.min_tokens else ()
        return frozenset(ends).union(word for before, word in self.words if known.endswith(before))

    def stays_same(self, num_tokens: int) -> int:
        """For how many further tokens the same ones are forbidden, whatever is chosen."""
        if self.num_before:
            return 0
        return self.min_tokens - 1 - num_tokens if num_tokens < self.min_tokens else FOR_EVER


def token_rules(
    min_tokens: int, end_ids: frozenset[int], words: Iterable[Sequence[int]]
) -> TokenRules | None:
    """The rules. None: they would forbid nothing."""
    unique = tuple(sorted({(array("I", word[:-1]).tobytes(), word[-1]) for word in words if len(word)}))
    return TokenRules(min_tokens, end_ids, unique) if min_tokens or unique else None
