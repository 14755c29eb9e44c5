"""Encodes and decodes text with the served model's tokenizer. Needs the extra `text` (`tokenizers`).

    with Client("127.0.0.1:50051") as client:
        tokenizer = client.tokenizer()
        with client.prefill(tokenizer.encode("Once upon")) as cache: ...

Importing this module does not import `tokenizers`. The server renders chat templates: pass messages to
`execute`.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from quire.errors import InternalError, PreconditionFailed
from quire.v1 import executor_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A decoder's replacement for bytes that are not (yet) a complete character.
_REPLACEMENT = "\ufffd"
# The text of a token can depend on this many tokens before it, such as whether it begins with a blank.
_CONTEXT_TOKENS = 8
# The last tokens of a context, among which these are looked for.
_LOOK_BACK_TOKENS = 64
# An incomplete character of UTF-8 has at most three bytes.
_MAX_INCOMPLETE_BYTES = 3
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


class ModelTokenizer:
    """The tokenizer of a model, and its end tokens. Thread-safe."""

    def __init__(self, info: executor_pb2.GetModelInfoResponse) -> None:
        """Created by a client's `tokenizer`. `info` is a response with tokenizer.json.

        Raises ImportError without `tokenizers`, PreconditionFailed (NO_TOKENIZER) if the model has none, and
        InternalError if the library cannot read tokenizer.json.
        """
        # The tokenizer of the library, with all its methods.
        self.library: Tokenizer = _loaded(info.tokenizer_json)
        names = (info.special_tokens.get(name, "") for name in ("bos_token", "eos_token"))
        found = [self.library.token_to_id(name) for name in names]
        own_end = [found[1]] if found[1] is not None else []
        # The ids of the end tokens: those of the model's configs, and the tokenizer's own.
        self.end_ids = frozenset([*info.model.eos_token_ids, *own_end])
        added = self.library.get_added_tokens_decoder()
        self._special_ids = {token.content: each for each, token in added.items() if token.special}
        decoder = self.library.decoder
        self._has_byte_fallback = decoder is not None and "ByteFallback" in str(decoder.__getstate__())
        of_config = [info.model.bos_token_id] if info.model.HasField("bos_token_id") else []
        self._begin_ids = [*found, *of_config, *info.model.eos_token_ids]

    @property
    def begin_id(self) -> int:
        """The token before the first token of a text when it is scored, as in lm-evaluation-harness.

        The tokenizer's bos, or its eos. If it has neither, those of the model's config, which may differ.
        Raises LookupError if the model has none of them.
        """
        for token_id in self._begin_ids:
            if token_id is not None:
                return token_id
        raise LookupError("the model names no token that begins or ends a text")

    def special_id(self, text: str) -> int | None:
        """The special token of this text, which `decode` leaves out; None: the text is not one."""
        return self._special_ids.get(text)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, including the special tokens around it unless `special_tokens` is False."""
        return list(self.library.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of tokens, without special tokens unless `special_tokens` is True."""
        return self.library.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token stands for, if it is one of those (byte fallback)."""
        token = self.library.id_to_token(token_id) if self._has_byte_fallback else None
        spelled = None if token is None else _BYTE.fullmatch(token)
        return None if spelled is None else int(spelled[1], 16)

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """Decodes tokens as they arrive. `context` has the tokens before them, such as the prompt."""
        return TextStream(self, context)


class TextStream:
    """Incremental detokenization that returns whole characters only. Not thread-safe.

    Its texts together are that of decoding all tokens at once. Tokens that stand for one byte each (byte
    fallback) have no text of their own: if the bytes of successive ones are not UTF-8 in all, each is a
    replacement character. So their text is returned when another token follows, or when they are invalid.
    """

    def __init__(self, tokenizer: ModelTokenizer, context: Sequence[int] = ()) -> None:
        """Created by `ModelTokenizer.stream`."""
        self._tokenizer = tokenizer
        self._run = _ByteRun()
        # Special tokens have no text, and decide nothing.
        with_text = [each for each in context[-_LOOK_BACK_TOKENS:] if tokenizer.decode([each] * 3)]
        ids = with_text[-_CONTEXT_TOKENS:]
        num_complete = len(ids) - self._num_incomplete(ids)
        if num_complete and tokenizer.byte_of(ids[num_complete - 1]) is not None:
            # Complete characters of bytes before the text stand, whatever follows.
            ids = ids[num_complete - 1 :]
            num_complete = 1
        for token_id in ids[num_complete:]:
            self._run.add(token_id, tokenizer.byte_of(token_id) or 0)
        self._restart(ids[:num_complete])

    def push(self, token_id: int) -> str:
        """The text that this token completes. May be empty: a character can consist of several tokens."""
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            # Nothing can complete what was held back.
            return self._show() + self._run.add(token_id, byte)
        if self._run.ids and not self._tokenizer.decode([token_id] * 3):
            # A special token: bytes before and behind it are successive.
            return ""
        text = self._end_run()
        self._ids.append(token_id)
        new = self._unshown()
        if not new or new.endswith(_REPLACEMENT):
            return text
        # The tokens whose text is returned now are the new context.
        self._restart(self._ids[self._num_shown :][-_CONTEXT_TOKENS:])
        return text + new

    def flush(self) -> str:
        """The remaining text after the last token: an incomplete character, as a replacement character."""
        return self._end_run() + self._show()

    def _end_run(self) -> str:
        """The text of the bytes so far, if it was not returned. The last one is the context from now on."""
        run, self._run = self._run, _ByteRun()
        if not run.ids:
            return ""
        # At the beginning of the whole text a decoder may strip something.
        is_first = not self._ids and not run.is_invalid
        text = self._tokenizer.decode(run.ids) if is_first else run.rest()
        self._restart(run.ids[-1:])
        return text

    def _restart(self, ids: Sequence[int]) -> None:
        # A few tokens whose text was returned, as context, then those whose text was not.
        self._ids = list(ids)
        self._num_shown = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)
        if not ids or self._tokenizer.byte_of(ids[-1]) is None:
            self._shown = self._shown.rstrip(_REPLACEMENT)

    def _show(self) -> str:
        new = self._unshown()
        self._num_shown = len(self._ids)
        self._shown += new
        return new

    def _unshown(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._shown) :]

    def _num_incomplete(self, ids: Sequence[int]) -> int:
        """How many tokens at the end are bytes that begin a character."""
        for number in range(min(_MAX_INCOMPLETE_BYTES, len(ids)), 0, -1):
            found = [self._tokenizer.byte_of(token_id) for token_id in ids[-number:]]
            with contextlib.suppress(UnicodeDecodeError):
                if None not in found and not _UTF8().decode(bytes(byte or 0 for byte in found)):
                    return number
        return 0


class _ByteRun:
    """Successive tokens that stand for one byte each."""

    def __init__(self) -> None:
        # If it is invalid, only the last one.
        self.ids: list[int] = []
        self.is_invalid = False
        self._characters: list[str] = []
        self._decoder = _UTF8()

    def add(self, token_id: int, byte: int) -> str:
        """Adds a token; returns what is known now, which is nothing as long as all bytes may be valid."""
        if self.is_invalid:
            self.ids = [token_id]
            return _REPLACEMENT
        self.ids.append(token_id)
        try:
            self._characters.append(self._decoder.decode(bytes([byte])))
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self.ids)
            self.ids, self.is_invalid = [token_id], True
            return text
        return ""

    def rest(self) -> str:
        """What `add` has not returned, if no further byte follows."""
        if self.is_invalid:
            return ""
        is_incomplete = bool(self._decoder.getstate()[0])
        return _REPLACEMENT * len(self.ids) if is_incomplete else "".join(self._characters)


def _loaded(tokenizer_json: bytes) -> Tokenizer:
    try:
        from tokenizers import Tokenizer, models  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("texts need the package tokenizers: pip install tokenizers") from error
    if not tokenizer_json:
        raise PreconditionFailed(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_TOKENIZER",
            "the model has no tokenizer: work with tokens",
        )
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library has no exception class of its own
        raise InternalError(
            grpc.StatusCode.INTERNAL, "", f"the model's tokenizer.json cannot be used: {error}"
        ) from error
    # Settings of the file's last use, and one for training, which older servers send.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer
