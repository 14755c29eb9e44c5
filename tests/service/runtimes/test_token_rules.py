"""What may not follow, against its definition."""

from __future__ import annotations

import random

from service.runtimes.token_rules import token_rules


def test_a_word_is_forbidden_where_its_beginning_is_the_end() -> None:
    """Also of tokens whose numbers share bytes."""
    rng = random.Random(1)
    vocabulary = [0, 1, 256, 1 << 16, 1 << 24, 257, (1 << 32) - 1]
    found = 0
    for _ in range(300):
        words = [rng.choices(vocabulary, k=rng.randrange(5)) for _ in range(rng.randrange(1, 30))]
        rules = token_rules(2, frozenset([5]), words)
        assert rules is not None and rules.num_before == max(0, *(len(word) - 1 for word in words))
        made = rng.choices(vocabulary, k=rng.randrange(8))
        last = made[max(0, len(made) - rules.num_before) :]
        ends = {5} if len(made) < 2 else set()
        bad = {word[-1] for word in words if word and made[max(0, len(made) + 1 - len(word)) :] == word[:-1]}
        assert rules.forbidden(len(made), last) == bad | ends
        found += len(bad)
    assert found > 500
