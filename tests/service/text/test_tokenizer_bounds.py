"""Which tokenizers the gateway decodes with: those whose decoders make no long text of few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders

from service.text.tokenizer import decodes_in_bounds
from tests.service.text.kinds import byte_fallback, byte_level, ctc, metaspace

SHIPPED = Path(__file__).parents[3] / "workers" / "models" / "adder" / "tokenizer.json"
ORDINARY = {
    "gpt2": byte_level(),
    "llama2": byte_fallback(),
    "metaspace": metaspace(),
    "ctc": ctc(),
    "shipped": Tokenizer.from_file(str(SHIPPED)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_tokenizer_is_used(name: str) -> None:
    assert decodes_in_bounds(ORDINARY[name])


UNKNOWN = {
    "replace": decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 2),
    "pattern": decoders.Replace(Regex("a*"), "b"),
    "size": decoders.Sequence([decoders.Fuse()] * 4096),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_decoder_that_may_expand_tokens_is_not(name: str) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = UNKNOWN[name]
    assert not decodes_in_bounds(tokenizer)


def test_a_vocabulary_with_a_long_token_is_not_used() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["a" * 5000])
    assert not decodes_in_bounds(tokenizer)
