"""Turns tokens into text one at a time, without ever showing half a character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

# What a decoder puts for bytes that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# Tokens that decide how the next one is written, such as with or without a space before it.
_CONTEXT_TOKENS = 8
# Tokens of a prompt among which they are looked for.
_LOOK_BACK_TOKENS = 64
# What is decoded again for each token.
_MAX_TOKENS = 16
# Bytes of a character that is not complete. More of what is no character will never be one.
_UNDECIDED_BYTES = 3


class Decodes(Protocol):
    """The one method of `tokenizers.Tokenizer` that is used."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""


class Detokenizer:
    """Text of a growing sequence of tokens.

    A character may be spread over tokens, and how a token is written may depend on the ones before it. So a
    new token is decoded together with a few before it, and what is new in their text is shown, but for a
    character at its end that is incomplete. A token costs the decoding of some twenty, however long the text.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int] = ()) -> None:
        """`context` is what stands before the first token, such as the prompt. It is not shown."""
        self._tokenizer = tokenizer
        self._ids = _last_of(tokenizer, context)
        self._text = tokenizer.decode(self._ids)
        # So many characters of the text were shown.
        self._shown = len(self._text.rstrip(_REPLACEMENT))
        # So many tokens ended with a whole character, and had this text.
        self._num_whole = 0
        self._whole = ""
        if self._shown == len(self._text):
            self._num_whole, self._whole = len(self._ids), self._text

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` is there; may be empty."""
        before = self._text
        self._ids.append(token_id)
        self._text = self._decoded()
        if self._text == before and _says_nothing(self._tokenizer, token_id):
            # However many of them there are, they do not push out what decides about the next one.
            self._ids.pop()
            return ""
        is_whole = not self._text.endswith(_REPLACEMENT)
        new = self._show(len(self._text.rstrip(_REPLACEMENT)))
        if len(self._text) - self._shown > 2 * _UNDECIDED_BYTES:
            new += self._show(len(self._text) - _UNDECIDED_BYTES)
        if is_whole and new and len(self._ids) > _MAX_TOKENS:
            # What begins with a whole character and has a text is context enough.
            self._keep(len(self._ids) - self._num_whole)
        elif len(self._ids) > 2 * _MAX_TOKENS:
            self._keep(_MAX_TOKENS)
        if is_whole:
            self._num_whole, self._whole = len(self._ids), self._text
        return new

    def flush(self) -> str:
        """What is still held back, with a replacement for a character that never became complete."""
        return self._show(len(self._text))

    def _show(self, until: int) -> str:
        new = self._text[self._shown : until]
        self._shown = max(self._shown, until)
        return new

    def _decoded(self) -> str:
        text = self._tokenizer.decode(self._ids)
        if text.startswith(self._whole):
            return text
        # Some decoders give up all of a run of bytes for one that does not fit; those shown stand.
        return self._whole + self._tokenizer.decode(self._ids[self._num_whole :])

    def _keep(self, num_tokens: int) -> None:
        """Forgets all but the last tokens, and what was shown of them."""
        held = len(self._text) - self._shown
        self._ids = self._ids[-num_tokens:]
        self._num_whole, self._whole = 0, ""
        self._text = self._decoded()
        self._shown = len(self._text) - held


def _last_of(tokenizer: Decodes, context: Sequence[int]) -> list[int]:
    """The last tokens that say something, without the half of a character at their beginning."""
    saying = (
        token_id
        for token_id in reversed(context[-_LOOK_BACK_TOKENS:])
        if not _says_nothing(tokenizer, token_id)
    )
    ids = list(itertools.islice(saying, _CONTEXT_TOKENS))[::-1]
    tails = [ids[-number:] for number in range(len(ids), 0, -1)]
    for tail in tails:
        if not tokenizer.decode(tail).startswith(_REPLACEMENT):
            return tail
    # They end with half a character: the bytes of that alone.
    return min(tails, key=lambda tail: tokenizer.decode(tail).count(_REPLACEMENT), default=[])


def _says_nothing(tokenizer: Decodes, token_id: int) -> bool:
    """Special tokens, wherever they stand. One blank alone may say nothing, and several do."""
    return not tokenizer.decode([token_id] * 3)
