"""Text token by token: no incomplete characters, nothing lost, and sent up to the first stop text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.detokenizer import Detokenizer
from tokenizers import Tokenizer, decoders

from service.text.stops import StopMatcher
from tests.service.text.kinds import END, KINDS, byte_fallback, kind


def decoded_pieces(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int]) -> list[str]:
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


@pytest.mark.parametrize("name", ["byte_level", "byte_level_across_words", "byte_fallback"])
@given(text=CHARACTERS, prompt=CHARACTERS, ends=st.integers(0, 40))
def test_the_text_is_that_of_one_decode(name: str, text: str, prompt: str, ends: int) -> None:
    tokenizer = kind(name)
    # Special tokens have no text, and do not change the text of later tokens.
    special = [end_of(tokenizer)] * ends
    context = tokenizer.encode("a" + prompt).ids + special
    ids = special + tokenizer.encode(text).ids
    returned = decoded_pieces(tokenizer, ids, context)
    assert "".join(returned) == tokenizer.decode(context + ids).removeprefix(tokenizer.decode(context))
    assert not any("\ufffd" in piece for piece in returned)


# As Gemma: the first space of a text is not stripped.
KINDS_OF_ANY = [*KINDS, "not stripped", "nested"]


def of_any_kind(name: str) -> Tokenizer:
    if name in KINDS:
        return kind(name)
    tokenizer = byte_fallback()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([decoders.Sequence(parts)] if name == "nested" else parts)
    return tokenizer


def any_ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Any tokens, of which many are parts of characters."""
    every = range(tokenizer.get_vocab_size())
    parts = [token_id for token_id in every if tokenizer.decode([token_id]) == "\ufffd"]
    drawn = st.sampled_from(every) | st.sampled_from(parts) if parts else st.sampled_from(every)
    return data.draw(st.lists(drawn, max_size=60))


# Of many kinds, each gets a part of the examples.
FEW = settings(max_examples=settings().max_examples // 3)


@pytest.mark.parametrize("name", KINDS_OF_ANY)
@given(data=st.data(), prompt=CHARACTERS, has_prompt=st.booleans())
@FEW
def test_the_text_of_any_tokens_is_that_of_one_decode(
    name: str, data: st.DataObject, prompt: str, has_prompt: bool
) -> None:
    """The prompt is a text, which ends neither within a character nor, with byte fallback, with bytes."""
    tokenizer = of_any_kind(name)
    letter = tokenizer.encode("a" if name != "adder" else "1", add_special_tokens=False).ids[-1:]
    context = tokenizer.encode(prompt).ids + letter if has_prompt else []
    ids = any_ids(tokenizer, data)
    text = tokenizer.decode(context + ids).removeprefix(tokenizer.decode(context))
    assert "".join(decoded_pieces(tokenizer, ids, context)) == text


@given(
    st.lists(st.sampled_from([b"\xe4\xb8\x96", b"A", b"\xc3\xa9"]), max_size=5).map(b"".join),
    st.integers(0, 2),
    st.binary(max_size=12) | st.text(max_size=6).map(str.encode),
)
def test_a_prompt_that_ends_with_bytes(complete: bytes, more: int, text: bytes) -> None:
    """What is complete in the prompt stays as it is; a character that begins there can be completed."""
    tokenizer = kind("byte_fallback")
    begun = b"\xe4\xb8\x96"[:more]
    context, ids = byte_ids(tokenizer, complete + begun), byte_ids(tokenizer, text)
    letter = tokenizer.token_to_id("b") or 0
    expected = tokenizer.decode([letter, *byte_ids(tokenizer, begun + text), letter])[1:]
    assert "".join(decoded_pieces(tokenizer, [*ids, letter], [letter, *context])) == expected


def test_only_the_last_character_of_a_prompt_can_be_completed() -> None:
    """Bytes before that are invalid, and replaced in the prompt."""
    tokenizer = kind("byte_level")
    context = [tokenizer.token_to_id(letter) or 0 for letter in "\u00eb\u00b3\u00f2"]
    assert decoded_pieces(tokenizer, tokenizer.encode("1").ids, context) == ["\ufffd1", ""]


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in text]


def test_bytes_have_a_text_when_another_token_follows() -> None:
    # An invalid byte behind them would change all of it.
    tokenizer = kind("byte_fallback")
    ids = [*tokenizer.encode("\u4e16\u754c").ids[1:], tokenizer.token_to_id("b") or 0]
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a").ids)
    assert [detokenizer.push(token_id) for token_id in ids[:-1]] == [""] * 6
    assert list(detokenizer.unsettled) == ["\u4e16", "\u754c"]
    assert (detokenizer.push(ids[-1]), detokenizer.flush()) == ("\u4e16\u754cb", "")
    assert list(detokenizer.unsettled) == []


class CountingDecoder:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = tokenizer.decoder
        self.id_to_token = tokenizer.id_to_token
        self.total = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.total += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("which", ["<0xE2>", "\u00e2", END])
def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_text(name: str, which: str) -> None:
    # Invalid bytes, special tokens, letters, spaces.
    tokenizer = kind(name)
    token_id = tokenizer.token_to_id(which) or 0
    counting = CountingDecoder(tokenizer)
    detokenizer = Detokenizer(counting, [0] * 1000)
    for _ in range(1000):
        detokenizer.push(token_id)
    assert counting.total < 60 * 1000


OF_STOPS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    positions = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(positions)]


def reference(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the stop text that ends first (the longest if several end there), and the stop text."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@given(OF_STOPS, STOPS, st.lists(st.integers(0, 40), max_size=10))
def test_a_text_ends_where_its_first_stop_begins(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    pushed, sent = "", ""
    for piece in cut(text, cuts):
        if matcher.found:
            break
        pushed += piece
        sent += matcher.push(piece)
        if not matcher.found:
            # Only text that may be the beginning of a stop text is held back.
            assert pushed.startswith(sent)
            assert len(pushed) - len(sent) <= max([len(stop) - 1 for stop in stops], default=0)
            assert not pushed[len(sent) :] or any(stop.startswith(pushed[len(sent) :]) for stop in stops)
    if not matcher.found:
        sent += matcher.flush()
    assert (sent, matcher.found) == reference(text, stops)


@given(OF_STOPS, STOPS, st.integers(0, 40))
def test_a_text_that_may_follow_ends_where_it_would(text: str, stops: list[str], number: int) -> None:
    """Asked at each of its characters, as long as none of them ended the text."""
    pushed, ahead = text[:number], text[number:]
    matcher = StopMatcher(stops)
    matcher.push(pushed)
    if matcher.found:
        return
    ends = [end for end in range(len(ahead) + 1) if matcher.ends_in(ahead[:end])]
    expected = [
        end for end in range(1, len(ahead) + 1) if any((pushed + ahead[:end]).endswith(s) for s in stops)
    ]
    assert ends[:1] == expected[:1]
