"""The files of a model directory that clients need to work with text. Models do not use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workers.models.chat_template import ChatTemplate, read_chat_template
from workers.models.generation_defaults import SamplingDefaults, read_sampling_defaults
from workers.models.tokenizer import read_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text files of a model, which are sent to clients.

    Attributes:
        tokenizer_json: The content of tokenizer.json; empty if there is none.
        chat_template: The chat templates and special tokens.
        sampling_defaults: The sampling settings that the model's makers recommend.
    """

    tokenizer_json: bytes = b""
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def read_text(directory: Path, vocab_size: int, max_bytes: int) -> ModelText:
    """Read a directory. Whatever exceeds `max_bytes` in all is left out, with a warning in the log.

    Raises:
        ModelError: A file is invalid.
    """
    sampling_defaults = read_sampling_defaults(directory)
    template = read_chat_template(directory, max_bytes)
    tokenizer_json = read_tokenizer(directory, vocab_size, max_bytes - template.nbytes)
    return ModelText(tokenizer_json, template, sampling_defaults)
