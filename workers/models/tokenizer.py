"""Reads the tokenizer.json of a model, which the server sends to clients. Nothing here tokenises."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from workers.models.errors import ModelError
from workers.models.files import exists, open_regular, parse_object, read_file

_log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"

# The largest known tokenizers have 33 MB, and 1.9 million values.
MAX_BYTES = 64 << 20
_MAX_VALUES = 2_500_000


def read_tokenizer(directory: Path, vocab_size: int, max_bytes: int) -> bytes:
    """The content of tokenizer.json; empty if there is none.

    A file of more than `max_bytes` cannot be sent to clients: it is left out, with a warning in the log.

    Raises:
        ModelError: It is not JSON or not a tokenizer, or it has token ids outside the model's vocabulary. A
            symbolic link may point to any file of this machine, and the content is sent to clients.
    """
    file = directory / TOKENIZER_FILE
    if not exists(file):
        return b""
    max_bytes = min(max_bytes, MAX_BYTES)
    with open_regular(file) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
    if size_bytes > max_bytes:
        _log.warning(
            "%s is too large to be sent to clients and is left out: it has %d bytes, the limit is %d",
            file,
            size_bytes,
            max_bytes,
        )
        return b""
    content = read_file(file, max_bytes)
    ids = _token_ids(parse_object(content, file, max_values=_MAX_VALUES), file)
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ModelError(f"{file}: the id of each token must be a whole number from 0")
    last = max(ids, default=0)
    if last >= vocab_size:
        raise ModelError(f"{file}: has token {last}, but the model's vocab_size is {vocab_size}")
    return content


def _token_ids(tokenizer: dict[str, object], file: Path) -> list[Any]:
    """All values in the places of token ids, for each kind of tokenizer model. Raises ModelError."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    if not isinstance(model, dict):
        raise ModelError(f"{file}: is not a tokenizer: model must be an object")
    vocab = model.get("vocab")
    ids: list[Any] = []
    if isinstance(vocab, dict):
        ids += vocab.values()
    elif isinstance(vocab, list):  # pieces with scores, in the order of their ids
        ids += range(len(vocab))
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    return ids
