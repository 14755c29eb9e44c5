"""Tiny random models that read and write text: with a token for each byte, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.chat_templates import QWEN, byte_tokenizer
from tests.model_factory import TinyModel, make_model

START, END = "<|im_start|>", "<|im_end|>"
# What the tokenizer does not use is for end tokens and the like.
VOCAB = 300


def save_tokenizer(directory: Path, *, chat_template: str | None = QWEN) -> PreTrainedTokenizerFast:
    """Gives a model the tokenizer, which is returned. START and END are behind the tokens of bytes."""
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(),
        eos_token=END,
        extra_special_tokens=[START],
        chat_template=chat_template,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_talker(directory: Path, spec: TinyModel | None = None, **generation: Any) -> Path:
    """Writes a model with the tokenizer, and its generation_config.json. Returns its directory."""
    make_model(directory, spec or TinyModel(vocab_size=VOCAB))
    tokenizer = save_tokenizer(directory)
    settings = {"eos_token_id": [tokenizer.eos_token_id], **generation}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory
