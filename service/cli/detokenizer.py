"""Turns tokens into text one at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# What a decoder puts for bytes that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# Tokens that decide how the next one is written, such as with or without a space before it. More than a
# character can be spread over, so that the last character shown lies in them as a whole.
_CONTEXT_TOKENS = 8


class Decodes(Protocol):
    """The one method of `tokenizers.Tokenizer` that is used."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""


class Detokenizer:
    """Text of a growing sequence of tokens.

    A character may be spread over tokens, and how a token is written may depend on the ones before it. So a
    few tokens are decoded together, with and without the new one, and the difference is shown; it is held
    back while it ends in an incomplete character.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = ()) -> None:
        """`context` is what stands before the first token, such as the prompt. It is not shown."""
        self._tokenizer = tokenizer
        # Tokens shown before that still decide how the next ones are written, then those held back.
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` is there; may be empty."""
        self._ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._ids[:-_CONTEXT_TOKENS]
        self._shown = len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back, with a replacement for a character that never became complete."""
        text = self._pending()
        self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._ids[: self._shown]).rstrip(_REPLACEMENT)
        return self._tokenizer.decode(self._ids)[len(shown) :]
