"""Which tokenizers the gateway decodes with: those that make no long text of few tokens, and never panic."""

from __future__ import annotations

import pytest
from tokenizers import Regex, decoders

from service.text.tokenizer import decodes_in_bounds
from tests.service.text.kinds import byte_level

UNKNOWN = {
    "replace": decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 2),
    "pattern": decoders.Replace(Regex("a*"), "b"),
    # The library panics where a text is shorter than what it strips.
    "strip": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "size": decoders.Sequence([decoders.Fuse()] * 4096),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_decoder_that_may_expand_tokens_or_panic_is_not(name: str) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = UNKNOWN[name]
    assert not decodes_in_bounds(tokenizer)


def test_a_vocabulary_with_a_long_token_is_not_used() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["a" * 5000])
    assert not decodes_in_bounds(tokenizer)
