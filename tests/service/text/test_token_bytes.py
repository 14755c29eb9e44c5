"""What a token adds to a text is read off the decoder, or the tokenizer is refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models

from service.errors import Unsupported
from service.text.detokenizer import Detokenizer
from service.text.token_bytes import constrained_tokens, token_bytes
from tests.service.text.kinds import END, KINDS, ends_of_words, sounds

kind = functools.cache(lambda name: KINDS[name]())


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_are_the_text_that_callers_see(name: str) -> None:
    tokenizer: Tokenizer = kind(name)
    tokens = token_bytes(tokenizer)
    assert len(tokens) == tokenizer.get_vocab_size()
    shown = [token_id for token_id, token in enumerate(tokens) if token]
    # All but special tokens, with the byte-level ones parts of characters too.
    assert len(shown) > 0.8 * len(tokens)
    begun = [next(token_id for token_id in shown if tokens[token_id].strip().isalnum())]
    rng = random.Random(1)
    for _ in range(200):
        ids = rng.choices(shown, k=rng.randint(1, 8))
        text = b"".join(tokens[token_id] for token_id in ids)
        try:
            whole = text.decode()
        except UnicodeDecodeError:
            continue
        detokenizer = Detokenizer(tokenizer, begun)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == whole


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_have_names_and_no_text(name: str) -> None:
    tokenizer: Tokenizer = kind(name)
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert not any(token_bytes(tokenizer)[token_id] for token_id in special)
    tokens, special_ids = constrained_tokens(tokenizer)
    assert sorted(special_ids) == sorted(special)
    assert name == "adder" or tokens[tokenizer.token_to_id(END) or 0] == END.encode()


def test_bytes_are_those_that_the_tokenizer_spells() -> None:
    for name in ("byte_level", "byte_fallback"):
        assert set(token_bytes(kind(name))) > {bytes([byte]) for byte in range(256)}
    tokenizer: Tokenizer = kind("byte_fallback")
    tokens = token_bytes(tokenizer)
    assert tokens[tokenizer.token_to_id("<0xE2>") or 0] == b"\xe2"
    assert tokens[tokenizer.token_to_id("\u2581the") or 0] == b" the"


@pytest.mark.parametrize("make", [ends_of_words, sounds, lambda: Tokenizer(models.WordLevel({}, "a"))])
def test_tokens_that_mean_no_text_of_their_own_are_refused(make: Callable[[], Tokenizer]) -> None:
    with pytest.raises(Unsupported, match="each stand for a text"):
        token_bytes(make())
