"""The tokenizer.json of a model, as it is handed out to callers. Nothing here tokenises."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from workers.models.errors import ModelError
from workers.models.files import is_there, open_regular, parse_object, read_whole

_log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"

# More than the largest that are known have: 33 MB, and 1.9 million values.
MAX_BYTES = 64 << 20
_MAX_VALUES = 2_500_000


def read_tokenizer(directory: Path, vocab_size: int, max_bytes: int) -> bytes:
    """The contents of tokenizer.json; empty where there is none.

    One that is larger than `max_bytes` could not be handed out: it is left out, and the log says so.

    Raises:
        ModelError: It is not a file of JSON or no tokenizer: a link may lead to any file of this machine, and
            callers are told what it holds. Or it has tokens that the model does not know.
    """
    file = directory / TOKENIZER_FILE
    if not is_there(file):
        return b""
    max_bytes = min(max_bytes, MAX_BYTES)
    with open_regular(file) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
    if size_bytes > max_bytes:
        _log.warning(
            "%s is too large to be handed out: it has %d bytes, %d are allowed", file, size_bytes, max_bytes
        )
        return b""
    content = read_whole(file, max_bytes)
    ids = _token_ids(parse_object(content, file, max_values=_MAX_VALUES), file)
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise ModelError(f"{file}: the id of each token must be a whole number from 0")
    last = max(ids, default=0)
    if last >= vocab_size:
        raise ModelError(f"{file}: has token {last}, the model's vocab_size is {vocab_size}")
    return content


def _token_ids(tokenizer: dict[str, object], file: Path) -> list[Any]:
    """All that stands for an id in a tokenizer, wherever its kind of model keeps them. Raises ModelError."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    if not isinstance(model, dict):
        raise ModelError(f"{file}: is no tokenizer: model must be an object")
    vocab = model.get("vocab")
    ids: list[Any] = []
    if isinstance(vocab, dict):
        ids += vocab.values()
    elif isinstance(vocab, list):  # of pieces with their scores, in the order of their ids
        ids += range(len(vocab))
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    return ids
