"""Texts as the tokens of the model that is served, and back. Needs the extra `text`, which is `tokenizers`.

    with Client("127.0.0.1:50051") as client:
        tokenizer = client.tokenizer()
        with client.prefill(tokenizer.encode("Once upon")) as cache: ...

Importing this module loads nothing of it. Chat templates are the server's: give `execute` messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from quire.errors import InternalError, PreconditionFailed
from quire.v1 import executor_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What a decoder puts for bytes that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# So many tokens before a text decide how its first one is written, such as with or without a blank before it.
_CONTEXT_TOKENS = 8


class ModelTokenizer:
    """The tokenizer of a model, and which of its tokens end a text. Safe for use by several threads."""

    def __init__(self, info: executor_pb2.GetModelInfoResponse) -> None:
        """Made by `tokenizer` of a client; `info` is an answer with tokenizer.json.

        Raises ImportError without `tokenizers`, PreconditionFailed (NO_TOKENIZER) for a model that has none,
        and InternalError for a tokenizer.json that the library does not read.
        """
        # All that the library can do with it.
        self.library: Tokenizer = _loaded(info.tokenizer_json)
        # A loop stops at these.
        self.end_ids = frozenset(info.model.eos_token_ids)
        names = (info.special_tokens.get(name, "") for name in ("bos_token", "eos_token"))
        found = [self.library.token_to_id(name) for name in names]
        of_config = [info.model.bos_token_id] if info.model.HasField("bos_token_id") else []
        self._begin_ids = [*found, *of_config, *info.model.eos_token_ids]

    @property
    def begin_id(self) -> int:
        """What the first token of a text is scored behind, as in lm-evaluation-harness.

        The tokenizer's bos, or else its eos; where it names neither the config's, which may be others. Raises
        LookupError for a model that has none of them.
        """
        for token_id in self._begin_ids:
            if token_id is not None:
                return token_id
        raise LookupError("the model names no token that begins or ends a text")

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with those that the model has around one unless `special_tokens` is False."""
        return list(self.library.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of tokens; special ones are left out unless `special_tokens` is True."""
        return self.library.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """For the text of tokens as they come. `context` is what stands before them, such as the prompt."""
        return TextStream(self, context)


class TextStream:
    """The text of a growing sequence of tokens, without half characters. Not for several threads at once."""

    def __init__(self, tokenizer: ModelTokenizer, context: Sequence[int] = ()) -> None:
        """Made by `ModelTokenizer.stream`."""
        self._tokenizer = tokenizer
        # A few tokens whose text was shown, for how those behind them are written, and those that were not.
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._num_shown = len(self._ids)
        self._shown = tokenizer.decode(self._ids).rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token. May be empty: a character may need several."""
        self._ids.append(token_id)
        new = self._unshown()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        # What is shown now is context enough.
        self._ids = self._ids[self._num_shown :][-_CONTEXT_TOKENS:]
        self._num_shown = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)
        return new

    def flush(self) -> str:
        """What is left when no more tokens come: a character that never became complete, as a replacement."""
        new = self._unshown()
        self._num_shown = len(self._ids)
        self._shown += new
        return new

    def _unshown(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._shown) :]


def _loaded(tokenizer_json: bytes) -> Tokenizer:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("texts need the package tokenizers: pip install tokenizers") from error
    if not tokenizer_json:
        raise PreconditionFailed(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_TOKENIZER",
            "the model has no tokenizer: work with tokens",
        )
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library has no kind of its own
        raise InternalError(
            grpc.StatusCode.INTERNAL, "", f"the model's tokenizer.json cannot be used: {error}"
        ) from error
