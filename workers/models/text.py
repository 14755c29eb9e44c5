"""What a model directory has for callers who work with text. The server uses none of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workers.models.chat_template import ChatTemplate, read_chat_template
from workers.models.generation_defaults import SamplingDefaults, read_sampling_defaults
from workers.models.tokenizer import read_tokenizer


@dataclass(frozen=True, slots=True)
class ModelText:
    """What is handed out.

    Attributes:
        tokenizer_json: The contents of tokenizer.json; empty where there is none.
        chat_template: How messages become a prompt, and the special tokens.
        sampling_defaults: How the model's makers draw from it.
    """

    tokenizer_json: bytes = b""
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def read_text(directory: Path, vocab_size: int, max_bytes: int) -> ModelText:
    """Reads a directory. What `max_bytes` has no room for is left out, and the log says so.

    Raises:
        ModelError: A file is not what it should be.
    """
    sampling_defaults = read_sampling_defaults(directory)
    template = read_chat_template(directory, max_bytes)
    tokenizer_json = read_tokenizer(directory, vocab_size, max_bytes - template.nbytes)
    return ModelText(tokenizer_json, template, sampling_defaults)
