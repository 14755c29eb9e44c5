"""Text token by token: never half a character, and nothing lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from service.cli.detokenizer import Detokenizer

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
