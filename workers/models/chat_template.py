"""Reads the chat templates of a model, which the server passes to clients as text.

A template is a program written by the makers of the model. Nothing here runs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import errors_naming, exists, open_regular, read_file, warn_too_large
from workers.models.token_settings import TOKENIZER_CONFIG_FILE, read_settings, read_token_settings
from workers.models.values import is_text

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_SUFFIX = ".jinja"
# Templates for other purposes than chat, each named by its file name without the suffix.
TEMPLATE_DIRECTORY = "additional_chat_templates"
DEFAULT = "default"

# The largest known template has 40 KB.
MAX_BYTES = 1 << 20
# Known models have at most three.
_MAX_TEMPLATES = 100
# A text without either of these ignores the messages, so it is not a template.
_JINJA = ("{{", "{%")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Templates by name, "default" for requests that name none; and the texts of special tokens."""

    sources: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of the message to clients, except for a few bytes per entry."""
        # The message has the special tokens twice.
        texts = (*self.sources.items(), *self.special_tokens.items(), *self.special_tokens.items())
        return sum(len(text.encode()) for pair in texts for text in pair)


def read_chat_template(directory: Path, max_bytes: int) -> ChatTemplate:
    """The templates and special tokens of a directory. Either may be missing.

    As in transformers, chat_template.jinja and the files of additional_chat_templates take precedence over
    tokenizer_config.json, which counts if they have no default template. Whatever exceeds `max_bytes` cannot
    be sent to clients: it is left out, with a warning in the log.

    Raises ModelError if a file is invalid; the message names the file and the setting.
    """
    max_bytes = min(max_bytes, MAX_BYTES)
    config = read_settings(directory)
    sources = _read_files(directory, max_bytes)
    if DEFAULT not in sources:
        with errors_naming(directory / TOKENIZER_CONFIG_FILE):
            sources = _sources(config.get("chat_template")) | sources
    sources = {name: source for name, source in sources.items() if source}
    template = ChatTemplate(sources, read_token_settings(directory).texts)
    if template.nbytes > max_bytes:
        warn_too_large(f"the chat template in {directory}", template.nbytes, max_bytes)
        return ChatTemplate()
    return template


def _read_files(directory: Path, max_bytes: int) -> dict[str, str]:
    """The templates in separate files, by name. Empty texts for those that are too large."""
    files = {DEFAULT: directory / TEMPLATE_FILE} if exists(directory / TEMPLATE_FILE) else {}
    named = _template_files(directory / TEMPLATE_DIRECTORY)
    files |= {file.name.removesuffix(TEMPLATE_SUFFIX): file for file in named}
    return {name: _read_file(file, max_bytes) for name, file in files.items()}


def _template_files(directory: Path) -> list[Path]:
    """The sorted templates of a directory; none if it does not exist. Raises ModelError."""
    try:
        files = sorted(directory.glob(f"*{TEMPLATE_SUFFIX}")) if directory.is_dir() else []
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error
    if len(files) > _MAX_TEMPLATES:
        raise ModelError(f"{directory}: holds more than {_MAX_TEMPLATES} templates")
    for file in files:
        if not is_text(file.name):
            raise ModelError(f"{directory}: {file.name!r} is not a valid name of a template")
    return files


def _read_file(file: Path, max_bytes: int) -> str:
    """The text of a file; empty if it is too large. Raises ModelError."""
    with open_regular(file) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
    if size_bytes > max_bytes:
        warn_too_large(f"the chat template in {file}", size_bytes, max_bytes)
        return ""
    try:
        source = read_file(file, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: is not UTF-8: {error}") from None
    # A symbolic link may point to any file of this machine, and the content is sent to clients.
    if source.strip() and not any(mark in source for mark in _JINJA):
        raise ModelError(f"{file}: is not a template: it has neither {' nor '.join(_JINJA)}")
    return source


def _sources(value: object) -> dict[str, str]:
    """One template, or several by name. Raises ModelError."""
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    sources: dict[str, str] = {}
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        name, source = fields.get("name"), fields.get("template")
        if not (is_text(name) and is_text(source)) or name in sources:
            raise ModelError("chat_template: must be a string, or a list of strings with distinct names")
        sources[str(name)] = str(source)
    return sources
