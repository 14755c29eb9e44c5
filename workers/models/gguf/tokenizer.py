"""Reads what a GGUF file has for texts: tokenizer, chat templates, pooling. Nothing here tokenises."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import POOLING
from workers.common.gguf.header import Value
from workers.common.gguf.settings import TOKEN_ARRAYS
from workers.common.gguf.splits import split_of
from workers.models.chat_template import DEFAULT, ChatTemplate
from workers.models.files import warn_too_large
from workers.models.gguf.tokenizer_json import PREFIX, strings, token_id, tokenizer_of
from workers.models.text import ModelText

_log = logging.getLogger(__name__)

TEXT_ARRAYS = (*TOKEN_ARRAYS, f"{PREFIX}scores", f"{PREFIX}merges")
TEMPLATE = "tokenizer.chat_template"

# llama.cpp's numbers of poolings, with the names of sentence-transformers. 4: scores of a reranker.
POOLINGS: Mapping[int, str] = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}


def read_text(metadata: Mapping[str, Value], vocab_size: int, max_bytes: int) -> ModelText:
    """The data that clients need to work with text; see `workers.models.text.read_text`.

    Args:
        metadata: The metadata of the file, with `TEXT_ARRAYS`.
        vocab_size: The size of the model's vocabulary.
        max_bytes: The limit of the total size. Anything above it is left out, with a warning in the log.

    Raises:
        GgufError: The tokenizer is invalid or of an unknown kind; the message names a key.
    """
    tokens = strings(metadata, "tokens")
    kind = metadata.get(f"{metadata.get('general.architecture')}.{POOLING}")
    pooling = POOLINGS.get(kind, "") if isinstance(kind, int) else ""
    if tokens is None:
        _log.warning("there is no tokenizer in the file, so texts are refused and only tokens served")
        return ModelText(chat_template=_template(metadata, [], max_bytes), pooling=pooling)
    if len(tokens) > vocab_size:
        raise GgufError(f"{PREFIX}tokens: has {len(tokens)} tokens, and the model has {vocab_size}")
    template = _template(metadata, tokens, max_bytes)
    made = tokenizer_of(metadata, tokens, split_of(metadata))
    content = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
    if len(content) > max_bytes - template.nbytes:
        warn_too_large("the tokenizer", len(content), max_bytes)
        content = b""
    end_id = token_id(metadata, "eos_token_id", len(tokens))
    return ModelText(content, template, end_id=end_id, pooling=pooling)


def _template(metadata: Mapping[str, Value], tokens: list[str], max_bytes: int) -> ChatTemplate:
    """The chat templates: the default one, and those with names."""
    sources: dict[str, str] = {}
    for key, value in metadata.items():
        name = DEFAULT if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}.")
        if (key == TEMPLATE or name != key) and isinstance(value, str) and value:
            sources[name] = value
    named = {
        f"{name}_token": token_id(metadata, f"{key}_token_id", len(tokens))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if tokens  # else ids stand for no texts
    }
    texts = {name: tokens[index] for name, index in named.items() if index is not None}
    template = ChatTemplate(sources, texts)
    if template.nbytes > max_bytes:
        warn_too_large("the chat template", template.nbytes, max_bytes)
        return ChatTemplate()
    return template
