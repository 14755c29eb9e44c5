"""The files of a model directory that clients need to work with text. Models do not use them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.models.chat_template import ChatTemplate, read_chat_template
from workers.models.generation_defaults import read_sampling_defaults
from workers.models.pooling import read_pooling
from workers.models.tokenizer import read_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text files of a model, which are sent to clients.

    Attributes:
        tokenizer_json: The content of a tokenizer.json; empty if there is none.
        chat_template: The chat templates and special tokens.
        sampling_defaults: The sampling settings that the model's makers recommend.
        pooling: How hidden states become an embedding; see `read_pooling`.
        end_id: The token that ends a text, according to the tokenizer; None: it names none.
    """

    tokenizer_json: bytes = b""
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    end_id: int | None = None
    pooling: str = ""

    def with_own_end(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        """The end tokens of the configs, and that of the tokenizer. Logs if it was not among them."""
        if self.end_id is None or self.end_id in end_ids:
            return tuple(end_ids)
        _log.info("token %d ends a text: it is the tokenizer's eos_token, and in no config", self.end_id)
        return (*end_ids, self.end_id)


def read_text(directory: Path, vocab_size: int, max_bytes: int) -> ModelText:
    """Read a directory. Content beyond `max_bytes` in total is left out, with a warning in the log.

    Raises ModelError if a file is invalid.
    """
    sampling_defaults = read_sampling_defaults(directory)
    template = read_chat_template(directory, max_bytes)
    tokenizer = read_tokenizer(directory, vocab_size, max_bytes - template.nbytes)
    template = replace(template, special_tokens={**tokenizer.named, **template.special_tokens})
    pooling = read_pooling(directory)
    return ModelText(tokenizer.content, template, sampling_defaults, tokenizer.end_id, pooling)
