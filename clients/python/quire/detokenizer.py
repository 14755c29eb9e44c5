"""Turns a stream of tokens into text, without incomplete characters. The server uses it, too."""

from __future__ import annotations

import codecs
import contextlib
import copy
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

# A token of byte fallback.
BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
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
    """The one method of `tokenizers.Tokenizer` that every use needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""


class Detokenizer:
    """The text of a growing sequence of tokens: together, that of decoding the whole sequence.

    A character may be spread over several tokens, and the text of a token may depend on those before it. So
    each new token is decoded with some before it, and the new part of their text is returned, except an
    incomplete character at its end. A token costs the decoding of about twenty tokens, however long the text.

    Tokens that stand for one byte each (byte fallback) have no text of their own: if the bytes of successive
    ones are not UTF-8 in all, each of them is a replacement character. So their text is known only when
    another token follows, or when they are invalid. Not thread-safe.
    """

    def __init__(self, tokenizer: TokenDecoder, context: Sequence[int] = ()) -> None:
        """`context`: tokens before the first one, such as the prompt. Their text is not returned."""
        self._tokenizer = tokenizer
        self._byte_of = _bytes_of(tokenizer)
        # The last tokens before the run of bytes, and their text.
        self._ids: list[int] = []
        self._text = ""
        # How many characters of `_text` were returned.
        self._num_returned = 0
        # The longest run of first tokens known to end with a complete character.
        self._num_complete = 0
        ids = _with_text(tokenizer, context)
        of_bytes = itertools.takewhile(lambda byte: byte is not None, map(self._byte_of, reversed(ids)))
        run = bytes(byte for byte in of_bytes if byte is not None)[::-1]
        # Complete characters of bytes before the text stand, whatever follows.
        num_complete = len(run) - _num_incomplete(run)
        before = ids[: len(ids) - len(run) + num_complete]
        self._restart(before[-1:] if num_complete else before)
        self._run = _ByteRun()
        for token_id, byte in zip(ids[len(before) :], run[num_complete:], strict=True):
            self._run.add(token_id, byte)

    @property
    def unsettled(self) -> str:
        """The last characters so far, which are returned unless the next tokens make their bytes invalid."""
        return self._run.characters

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is known now, which may be empty."""
        byte = self._byte_of(token_id)
        if byte is not None:
            # Nothing can complete what was held back.
            return self._return_until(len(self._text)) + self._run.add(token_id, byte)
        if not self._run.ids:
            return self._push(token_id)
        if has_no_text(self._tokenizer, token_id):
            return ""
        return self._end_run() + self._push(token_id)

    def copy(self) -> Detokenizer:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._ids, other._run = self._ids.copy(), self._run.copy()  # noqa: SLF001 - of its own class
        return other

    def flush(self) -> str:
        """Returns the rest at the end: an incomplete character as a replacement character."""
        return self._end_run() + self._return_until(len(self._text))

    def _push(self, token_id: int) -> str:
        before = self._text
        self._ids.append(token_id)
        self._text = self._tokenizer.decode(self._ids)
        if self._text == before and has_no_text(self._tokenizer, token_id):
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
            self._num_complete = len(self._ids)
        return new

    def _end_run(self) -> str:
        """The text of the bytes so far, if it was not returned. The last one is the context from now on."""
        if not self._run.ids:
            return ""
        run, self._run = self._run, _ByteRun()
        # At the beginning of the whole text a decoder may strip something.
        is_first = not self._ids and not run.is_invalid
        text = self._tokenizer.decode(run.ids) if is_first else run.rest()
        self._restart(run.ids[-1:])
        return text

    def _restart(self, ids: Sequence[int]) -> None:
        """Continues after these tokens, whose text is not returned, except an incomplete character."""
        self._ids = list(ids)
        self._text = self._tokenizer.decode(self._ids)
        is_byte = len(self._ids) == 1 and self._byte_of(self._ids[0]) is not None
        self._num_returned = len(self._text) - (not is_byte and self._text.endswith(_REPLACEMENT))
        self._num_complete = len(self._ids) if self._num_returned == len(self._text) else 0

    def _return_until(self, end: int) -> str:
        new = self._text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        return new

    def _drop_all_but(self, num_tokens: int) -> None:
        """Forgets all but the last tokens, and the returned text of the others."""
        num_held = len(self._text) - self._num_returned
        self._ids = self._ids[-num_tokens:]
        self._num_complete = 0
        self._text = self._tokenizer.decode(self._ids)
        self._num_returned = len(self._text) - num_held


class _ByteRun:
    """Successive tokens that stand for one byte each."""

    def __init__(self) -> None:
        # If it is invalid, only the last one.
        self.ids: list[int] = []
        # The complete characters of a valid run, and the bytes behind them.
        self.characters = ""
        self._incomplete = b""
        self.is_invalid = False

    def copy(self) -> _ByteRun:
        other = copy.copy(self)
        other.ids = self.ids.copy()
        return other

    def add(self, token_id: int, byte: int) -> str:
        """Adds a token; returns what is known now, which is nothing as long as all bytes may be valid."""
        if self.is_invalid:
            self.ids = [token_id]
            return _REPLACEMENT
        self.ids.append(token_id)
        self._incomplete += bytes([byte])
        try:
            text, num_decoded = codecs.utf_8_decode(self._incomplete)
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self.ids)
            self.ids, self.characters, self.is_invalid = [token_id], "", True
            return text
        self.characters += text
        self._incomplete = self._incomplete[num_decoded:]
        return ""

    def rest(self) -> str:
        """What `add` has not returned, if no further byte follows."""
        if self.is_invalid:
            return ""
        return _REPLACEMENT * len(self.ids) if self._incomplete else self.characters


def decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    """The settings of a decoder, or of the parts of a sequence of them: each has a type."""
    found = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while any(part["type"] == "Sequence" for part in found):
        found = [inner for part in found for inner in part.get("decoders", [part])]
    return found


def decoder_types(decoder: Any) -> set[str]:
    """The types of a decoder's parts."""
    return {part["type"] for part in decoder_parts(decoder)}


def _bytes_of(tokenizer: Any) -> Callable[[int], int | None]:
    """The byte that a token stands for, or None. Only decoders with byte fallback have such tokens."""
    if "ByteFallback" not in decoder_types(getattr(tokenizer, "decoder", None)):
        return lambda _token_id: None

    def byte_of(token_id: int) -> int | None:
        token = tokenizer.id_to_token(token_id)
        spelled = BYTE_FALLBACK.fullmatch(token) if token is not None else None
        return None if spelled is None else int(spelled[1], 16)

    return byte_of


def _num_incomplete(run: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for number in range(min(_MAX_INCOMPLETE_BYTES, len(run)), 0, -1):
        with contextlib.suppress(UnicodeDecodeError):
            if not codecs.utf_8_decode(run[-number:])[0]:
                return number
    return 0


def _with_text(tokenizer: TokenDecoder, context: Sequence[int]) -> list[int]:
    with_text = (
        token_id
        for token_id in reversed(context[-_LOOK_BACK_TOKENS:])
        if not has_no_text(tokenizer, token_id)
    )
    return list(itertools.islice(with_text, _CONTEXT_TOKENS))[::-1]


def has_no_text(tokenizer: TokenDecoder, token_id: int) -> bool:
    """Whether it is a special token. Decodes it three times: a decoder may strip a single space."""
    return not tokenizer.decode([token_id] * 3)
