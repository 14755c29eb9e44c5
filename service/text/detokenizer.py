"""Turns a stream of tokens into text, without incomplete characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

# What a decoder writes for bytes that are not a (complete) character.
_REPLACEMENT = "\ufffd"
# Tokens before a new one that can decide how it is written, for example with or without a space.
_CONTEXT_TOKENS = 8
# The last tokens of a prompt, among which the context is looked for.
_LOOK_BACK_TOKENS = 64
# Tokens that are decoded again with each new one.
_MAX_TOKENS = 16
# An incomplete character of UTF-8 has at most three bytes. More are invalid, whatever follows.
_MAX_INCOMPLETE_BYTES = 3


class TokenDecoder(Protocol):
    """The one method of `tokenizers.Tokenizer` that is used."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""


class Detokenizer:
    """The text of a growing sequence of tokens.

    A character may be spread over several tokens, and the text of a token may depend on those before it. So
    each new token is decoded with some before it, and the new part of their text is returned, except an
    incomplete character at its end. A token costs the decoding of about twenty tokens, however long the text.
    """

    def __init__(self, tokenizer: TokenDecoder, context: Sequence[int] = ()) -> None:
        """`context`: tokens before the first one, such as the prompt. Their text is not returned."""
        self._tokenizer = tokenizer
        self._ids = _last_with_text(tokenizer, context)
        self._text = tokenizer.decode(self._ids)
        # How many characters of `_text` were returned.
        self._num_returned = len(self._text.rstrip(_REPLACEMENT))
        # The longest run of first tokens known to end with a complete character, and its text.
        self._num_complete = 0
        self._complete = ""
        if self._num_returned == len(self._text):
            self._num_complete, self._complete = len(self._ids), self._text

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is complete now, which may be empty."""
        before = self._text
        self._ids.append(token_id)
        self._text = self._decode()
        if self._text == before and _has_no_text(self._tokenizer, token_id):
            # Not kept, so that many of them do not push out the context of the next token.
            self._ids.pop()
            return ""
        is_complete = not self._text.endswith(_REPLACEMENT)
        new = self._return_until(len(self._text.rstrip(_REPLACEMENT)))
        if len(self._text) - self._num_returned > 2 * _MAX_INCOMPLETE_BYTES:
            new += self._return_until(len(self._text) - _MAX_INCOMPLETE_BYTES)
        if is_complete and new and len(self._ids) > _MAX_TOKENS:
            # The new tokens begin with a complete character and have a text: enough context.
            self._drop_all_but(len(self._ids) - self._num_complete)
        elif len(self._ids) > 2 * _MAX_TOKENS:
            self._drop_all_but(_MAX_TOKENS)
        if is_complete:
            self._num_complete, self._complete = len(self._ids), self._text
        return new

    def flush(self) -> str:
        """Returns the rest at the end: an incomplete character as a replacement character."""
        return self._return_until(len(self._text))

    def _return_until(self, end: int) -> str:
        new = self._text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        return new

    def _decode(self) -> str:
        text = self._tokenizer.decode(self._ids)
        if text.startswith(self._complete):
            return text
        # Some decoders replace a whole run of bytes if one is invalid. Complete characters before it stand.
        return self._complete + self._tokenizer.decode(self._ids[self._num_complete :])

    def _drop_all_but(self, num_tokens: int) -> None:
        """Forgets all but the last tokens, and the returned text of the others."""
        num_held = len(self._text) - self._num_returned
        self._ids = self._ids[-num_tokens:]
        self._num_complete, self._complete = 0, ""
        self._text = self._decode()
        self._num_returned = len(self._text) - num_held


def _last_with_text(tokenizer: TokenDecoder, context: Sequence[int]) -> list[int]:
    """The last tokens that have a text, from the beginning of a character on."""
    with_text = (
        token_id
        for token_id in reversed(context[-_LOOK_BACK_TOKENS:])
        if not _has_no_text(tokenizer, token_id)
    )
    ids = list(itertools.islice(with_text, _CONTEXT_TOKENS))[::-1]
    tails = [ids[-number:] for number in range(len(ids), 0, -1)]
    for tail in tails:
        if not tokenizer.decode(tail).startswith(_REPLACEMENT):
            return tail
    # The context ends with an incomplete character: only the bytes of that.
    return min(tails, key=lambda tail: tokenizer.decode(tail).count(_REPLACEMENT), default=[])


def _has_no_text(tokenizer: TokenDecoder, token_id: int) -> bool:
    """Whether it is a special token. Decodes it three times: a decoder may strip a single space."""
    return not tokenizer.decode([token_id] * 3)
