"""Encodes and decodes text with the served model's tokenizer. Needs the extra `text` (`tokenizers`).

    with Client("127.0.0.1:50051") as client:
        tokenizer = client.tokenizer()
        with client.prefill(tokenizer.encode("Once upon")) as cache: ...

Importing this module does not import `tokenizers`. The server renders chat templates: pass messages to
`execute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from quire.detokenizer import Detokenizer
from quire.errors import InternalError, PreconditionFailed
from quire.v1 import executor_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ModelTokenizer:
    """The tokenizer of a model, and its end tokens. Thread-safe."""

    def __init__(self, info: executor_pb2.GetModelInfoResponse) -> None:
        """Created by a client's `tokenizer`. `info` is a response with tokenizer.json.

        Raises ImportError without `tokenizers`, PreconditionFailed (NO_TOKENIZER) if the model has none, and
        InternalError if the library cannot read tokenizer.json.
        """
        # The tokenizer of the library, with all its methods.
        self.library: Tokenizer = _loaded(info.tokenizer_json)
        own_end = self.library.token_to_id(info.special_tokens.get("eos_token", ""))
        # The ids of the end tokens: those of the model's configs, and the tokenizer's own.
        self.end_ids = frozenset([*info.model.eos_token_ids, *([] if own_end is None else [own_end])])

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, including the special tokens around it unless `special_tokens` is False."""
        return list(self.library.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of tokens, without special tokens unless `special_tokens` is True."""
        return self.library.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def stream(self, context: Sequence[int] = ()) -> Detokenizer:
        """Decodes tokens as they arrive. `context` has the tokens before them, such as the prompt."""
        return Detokenizer(self.library, context)


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
    except Exception as error:  # the library has no exception class of its own
        raise InternalError(
            grpc.StatusCode.INTERNAL, "", f"the model's tokenizer.json cannot be used: {error}"
        ) from error
