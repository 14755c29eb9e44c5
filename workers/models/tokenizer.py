"""Reads the tokenizer of a model, which the server sends to clients. Nothing here tokenises.

The result is a tokenizer.json that encodes and decodes as transformers' AutoTokenizer does with the whole
directory: with the tokens that only other files have, and without its settings for training.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.models.errors import ModelError
from workers.models.files import exists, open_regular, parse_object, read_file, warn_too_large
from workers.models.other_tokenizers import MadeTokenizer, make_tokenizer
from workers.models.token_settings import AddedToken, TokenSettings, added_token, read_token_settings

_log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# Files from which classes of transformers make a tokenizer.json.
_OTHER_FILES = ("*.model", "vocab.*", "tekken.json", "*.tiktoken")

# The largest known tokenizers have 33 MB, and 1.9 million values.
MAX_BYTES = 64 << 20
_MAX_VALUES = 2_500_000
# The limit of the library and of protobuf messages.
_MAX_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json for clients.

    Attributes:
        content: The JSON. Empty: there is none.
        end_id: The token that ends a text, according to the tokenizer; None: it names none.
        named: Texts of special tokens that no file of settings has, by the names that templates use.
    """

    content: bytes = b""
    end_id: int | None = None
    named: Mapping[str, str] = field(default_factory=dict)


def read_tokenizer(directory: Path, vocab_size: int, max_bytes: int) -> TokenizerFile:
    """The tokenizer of a directory.

    If it is larger than `max_bytes`, it cannot be sent to clients: it is left out, with a warning in the log.
    It may have tokens outside the model's vocabulary, with which requests are refused.

    Raises ModelError if it is not JSON or not a tokenizer, or has an invalid token id. A symbolic link may
    point to any file of this machine, and the content is sent to clients.
    """
    file = directory / TOKENIZER_FILE
    max_bytes = min(max_bytes, MAX_BYTES)
    settings = read_token_settings(directory)
    content, named = b"", dict[str, str]()
    if exists(file):
        with open_regular(file) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes > max_bytes:
            warn_too_large(file, size_bytes, max_bytes)
            return TokenizerFile()
        content = read_file(file, max_bytes)
        parsed = parse_object(content, file, max_values=_MAX_VALUES)
    else:
        made = _made(directory, settings)
        if made is None:
            return TokenizerFile()
        file, parsed, named = made.file, made.content, dict(made.named)
    vocabulary = _Vocabulary(parsed, file)
    has_more = vocabulary.add_those_of(settings, parsed)
    if _reset(parsed) or has_more or not content:
        # Lone surrogates are kept: the library refuses the file as it would the original one.
        text = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
        content = text.encode(errors="surrogatepass")
    if len(content) > max_bytes:
        warn_too_large(file, len(content), max_bytes)
        return TokenizerFile()
    beyond = vocabulary.num_beyond(vocab_size)
    if beyond:
        _log.info(
            "%s: %d of its tokens are not in the model's vocabulary of %d: requests with them are refused",
            file,
            beyond,
            vocab_size,
        )
    end_id = vocabulary.id_of((named | settings.texts).get("eos_token", ""))
    return TokenizerFile(content, end_id if end_id is not None and end_id < vocab_size else None, named)


def _made(directory: Path, settings: TokenSettings) -> MadeTokenizer | None:
    """A tokenizer made from other files. None, after a warning in the log: clients get none."""
    try:
        made, why = make_tokenizer(directory, settings), ""
    except ModelError as error:
        made, why = None, f" ({error})"
    if made is None:
        _warn_without(directory, why)
    return made


def _warn_without(directory: Path, why: str) -> None:
    """Log that clients get no tokenizer, and how to make one from the existing files."""
    others = [file.name for pattern in _OTHER_FILES for file in directory.glob(pattern)]
    made_by = "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
    # Version 5 makes other tokens for spaces from SentencePiece files.
    how = f"; {made_by} of transformers 4 makes it from {others[0]}" if others else ""
    what = f"{TOKENIZER_FILE}{why}"
    _log.warning("there is no %s, so texts are refused and only tokens served%s", what, how)


def _reset(tokenizer: dict[str, Any]) -> bool:
    """Remove settings that are not the tokenizer's. Returns whether there were any.

    `truncation` and `padding` are those of the last call before the file was written, which transformers
    sets anew for each call. `dropout` makes training encode a text differently each time.
    """
    has_any = False
    for owner, name in ((tokenizer, "truncation"), (tokenizer, "padding"), (tokenizer["model"], "dropout")):
        if owner.get(name) is not None:
            owner[name] = None
            has_any = True
    return has_any


class _Vocabulary:
    """The ids of a tokenizer's tokens as the library numbers them: it ignores those of added tokens."""

    def __init__(self, tokenizer: Mapping[str, Any], file: Path) -> None:
        """Raises ModelError if it is not a tokenizer, or has an invalid id."""
        model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
        if not isinstance(model, dict):
            raise ModelError(f"{file}: is not a tokenizer: model must be an object")
        vocab = model.get("vocab")
        entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
        self._model: dict[str, Any] = vocab if isinstance(vocab, dict) else {}
        if isinstance(vocab, list):  # pieces with scores, in the order of their ids
            pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocab)
            self._model = {str(piece): token_id for token_id, piece in enumerate(pieces)}
        self._next_id = len(vocab) if isinstance(vocab, dict | list) else 0
        for token_id in (*self._model.values(), *(entry.get("id") for entry in entries)):
            if type(token_id) is not int or not 0 <= token_id <= _MAX_ID:
                raise ModelError(f"{file}: the id of each token must be a whole number from 0 to {_MAX_ID}")
        self._ids: dict[str, int] = {}
        self._tokens: dict[str, AddedToken] = {}
        # The added tokens of the file itself, by the ids that are written there.
        self._own: dict[int, AddedToken] = {}
        for entry in entries:
            token = added_token(entry)
            if token is not None:
                self._own[entry["id"]] = token
                self._add(token)

    def add_those_of(self, settings: TokenSettings, tokenizer: dict[str, Any]) -> bool:
        """Append the tokens of other files to a tokenizer. Returns whether there are any.

        A token that differs from a known one of the same text comes after it, as when the library adds it.
        """
        padding = tokenizer.get("padding")
        padding_token = padding.get("pad_token") if isinstance(padding, dict) else None
        new = [
            {"id": self._ids[token.content], **dataclasses.asdict(token)}
            for token in settings.to_add(self._own, padding_token)
            if self._add(token)
        ]
        if new:
            tokenizer["added_tokens"] = [*(tokenizer.get("added_tokens") or ()), *new]
        return bool(new)

    def id_of(self, content: str) -> int | None:
        """The id of the token with a text; None: there is none."""
        return self._ids.get(content, self._model.get(content))

    def num_beyond(self, vocab_size: int) -> int:
        """The number of ids that are not below `vocab_size`."""
        return sum(token_id >= vocab_size for token_id in {*self._model.values(), *self._ids.values()})

    def _add(self, token: AddedToken) -> bool:
        """Adds a token, unless exactly this one exists."""
        if not token.content or self._tokens.get(token.content) == token:
            return False
        token_id = self.id_of(token.content)
        if token_id is None:
            token_id = self._next_id
        self._next_id = max(self._next_id, token_id + 1)
        self._ids[token.content], self._tokens[token.content] = token_id, token
        return True
