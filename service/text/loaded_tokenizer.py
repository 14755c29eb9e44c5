"""Loads a tokenizer.json, for all that use one here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """The tokenizer, which encodes whole texts, always in the same way.

    A file may also have settings of its last use, which transformers sets anew for each call, and one for
    training. A worker leaves them out, but an older one sends the file as it is. Raises what the library
    raises.
    """
    # Not needed by a server whose callers send only tokens.
    from tokenizers import Tokenizer, models  # noqa: PLC0415

    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer
