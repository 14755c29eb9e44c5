"""Text token by token: never half a character, and nothing lost."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from service.text.detokenizer import Detokenizer
from tests.service.text.kinds import END, KINDS

SPECIAL = 256


class ByteTokens:
    """One token for each byte; one special token without a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != SPECIAL).decode("utf-8", errors="replace")


class WordTokens:
    """Words, the first of which is written without the space before it."""

    words = ("a", "b", "c")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in ids)


def pieces(text: bytes, context: bytes = b"") -> list[str]:
    detokenizer = Detokenizer(ByteTokens(), context)
    return [*(detokenizer.push(byte) for byte in text), detokenizer.flush()]


def test_a_character_is_shown_when_it_is_complete() -> None:
    assert pieces("aé€😀".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_what_never_becomes_complete_is_shown_at_the_end() -> None:
    assert pieces("é".encode()[:1]) == ["", "\ufffd"]
    assert pieces(b"\xc3A") == ["", "\ufffdA", ""]


def test_a_character_that_the_prompt_began() -> None:
    begun, ended = "é".encode()[:1], "é".encode()[1:]
    assert pieces(ended + b"b", context=b"a" + begun) == ["é", "b", ""]


def test_the_prompt_decides_about_the_space() -> None:
    assert Detokenizer(WordTokens()).push(1) == "b"
    assert Detokenizer(WordTokens(), [0]).push(1) == " b"


def test_special_tokens_show_nothing() -> None:
    detokenizer = Detokenizer(ByteTokens())
    assert [detokenizer.push(token) for token in (65, SPECIAL, 66, SPECIAL)] == ["A", "", "B", ""]


@given(
    st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])),
    st.text(max_size=4),
)
def test_nothing_is_lost_and_no_half_character_shown(text: str, context: str) -> None:
    context = context.replace("\ufffd", "").encode("utf-8", errors="ignore").decode()
    shown = pieces(text.encode(), context.encode())
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)


def told(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


CHARACTERS = st.text(
    alphabet=st.sampled_from("ab c\u00e9\u20ac\u4e16\u754c\U0001f600\u0301\n{")
    | st.characters(exclude_categories=["Cs"])
).filter(lambda text: "\ufffd" not in text)


def end_of(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(END)
    assert token_id is not None
    return token_id


kind = functools.cache(lambda name: KINDS[name]())


@pytest.mark.parametrize("name", ["byte_level", "byte_level_across_words", "byte_fallback"])
@given(text=CHARACTERS, prompt=CHARACTERS, ends=st.integers(0, 20))
def test_a_text_comes_as_if_decoded_as_a_whole(name: str, text: str, prompt: str, ends: int) -> None:
    tokenizer: Tokenizer = kind(name)
    # Special tokens say nothing, and change nothing for those behind them.
    context = [*tokenizer.encode("a" + prompt).ids, *([end_of(tokenizer)] * ends)]
    ids = tokenizer.encode(text).ids
    shown = told(tokenizer, ids, context)
    assert "".join(shown) == tokenizer.decode(context + ids).removeprefix(tokenizer.decode(context))
    assert not any("\ufffd" in piece for piece in shown)


@pytest.mark.parametrize("name", ["metaspace", "word_pieces", "words", "adder"])
@given(data=st.data())
def test_any_tokens_of_words_come_as_if_decoded_as_a_whole(name: str, data: st.DataObject) -> None:
    tokenizer: Tokenizer = kind(name)
    some = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)
    context, ids = data.draw(some), data.draw(some)
    assert "".join(told(tokenizer, ids, context)) == tokenizer.decode(context + ids).removeprefix(
        tokenizer.decode(context)
    )


def test_characters_of_bytes_one_after_another() -> None:
    # Found with a window of eight tokens, which then begins within a character.
    tokenizer: Tokenizer = kind("byte_fallback")
    text = "\u4e16\u754c" * 10
    ids = tokenizer.encode(text).ids[1:]
    assert [piece for piece in told(tokenizer, ids, tokenizer.encode("a").ids) if piece] == list(text)


def test_after_characters_of_bytes_in_the_prompt() -> None:
    tokenizer: Tokenizer = kind("byte_fallback")
    ids = tokenizer.encode("\u4e16" * 8).ids[1:]
    assert "".join(told(tokenizer, ids[10:], ids[:10])) == "\u4e16" * 5


def test_what_does_not_fit_takes_nothing_else_along() -> None:
    tokenizer: Tokenizer = kind("byte_fallback")
    good, bad = tokenizer.encode("\u4e16").ids[1:], (tokenizer.token_to_id("<0xE2>") or 0)
    ids = [*good, bad, *good, tokenizer.token_to_id("b") or 0]
    assert "".join(told(tokenizer, ids, [])).startswith("\u4e16\ufffd")


class Counting:
    """How many tokens are decoded, and how many at most at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.total = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.total += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("which", ["<0xE2>", "\u00e2", END, "a", "\u2581"])
def test_a_token_costs_the_same_however_long_the_text(name: str, which: str) -> None:
    # Bytes that never become a character, special tokens, letters, blanks.
    tokenizer: Tokenizer = kind(name)
    token_id = tokenizer.token_to_id(which) or 0
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting, [0] * 1000)
    for _ in range(1000):
        detokenizer.push(token_id)
    assert counting.total < 60 * 1000


def test_bytes_that_are_no_characters_are_shown_while_more_of_them_come() -> None:
    tokenizer: Tokenizer = kind("byte_fallback")
    bad = tokenizer.token_to_id("<0xE2>") or 0
    shown = told(tokenizer, [bad] * 100, [])
    assert "".join(shown) == "\ufffd" * 100
    assert len("".join(shown[:50])) >= 40
