"""The bytes of tokens are those that the decoder writes, or the tokenizer is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from quire.detokenizer import Detokenizer
from tokenizers import Regex, Tokenizer, decoders, models

from service.errors import Unsupported
from service.text.token_bytes import token_bytes
from service.text.tokenizer import decodes_in_bounds
from tests.service.text.kinds import KINDS, byte_level, ctc, end_of_word_suffix, kind


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_are_the_text_of_the_detokenizer(name: str) -> None:
    tokenizer = kind(name)
    tokens, special_ids = token_bytes(tokenizer)
    assert len(tokens) == tokenizer.get_vocab_size()
    with_text = [n for n, token in enumerate(tokens) if token and n not in special_ids]
    # All but special tokens; with byte-level tokenizers also parts of characters.
    assert len(with_text) > 0.8 * len(tokens)
    context = [next(token_id for token_id in with_text if tokens[token_id].strip().isalnum())]
    rng = random.Random(1)
    for _ in range(200):
        ids = rng.choices(with_text, k=rng.randint(1, 8))
        text = b"".join(tokens[token_id] for token_id in ids)
        try:
            whole = text.decode()
        except UnicodeDecodeError:
            continue
        detokenizer = Detokenizer(tokenizer, context)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == whole


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_have_names(name: str) -> None:
    tokenizer = kind(name)
    tokens, special_ids = token_bytes(tokenizer)
    special = {n: token for n, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert {n: tokens[n].decode() for n in special_ids} == {n: token.content for n, token in special.items()}


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_tokens_beyond_the_models_vocabulary_are_left_out(name: str) -> None:
    tokenizer = kind(name)
    tokens, special_ids = token_bytes(tokenizer)
    size = len(tokens) - 1
    fewer, fewer_special = token_bytes(tokenizer, size)
    assert (fewer, fewer_special) == (
        tokens[:size],
        [token_id for token_id in special_ids if token_id < size],
    )
    assert token_bytes(tokenizer, 1 << 20) == (tokens, special_ids)


def test_byte_tokens_have_their_bytes() -> None:
    for name in ("byte_level", "byte_fallback"):
        assert set(token_bytes(kind(name))[0]) > {bytes([byte]) for byte in range(256)}
    tokenizer = kind("byte_fallback")
    tokens, _ = token_bytes(tokenizer)
    assert tokens[tokenizer.token_to_id("<0xE2>") or 0] == b"\xe2"
    assert tokens[tokenizer.token_to_id("\u2581the") or 0] == b" the"


@pytest.mark.parametrize("make", [end_of_word_suffix, ctc, lambda: Tokenizer(models.WordLevel({}, "a"))])
def test_tokens_without_the_same_text_everywhere_are_refused(make: Callable[[], Tokenizer]) -> None:
    with pytest.raises(Unsupported, match="same text everywhere"):
        token_bytes(make())


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
