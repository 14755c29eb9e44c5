"""The chat template of a model, as it is handed out to callers. Nothing here renders it.

A template is a program of whoever made the model. To the server it is text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import is_there, open_regular, parse_object, read_whole

_log = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
DEFAULT = "default"

# The longest that are known have 40 KB.
MAX_BYTES = 1 << 20
# Lists of added tokens make these files large: the largest known have 2 MB.
_MAX_CONFIG_BYTES = 16 << 20
# Without one of these a prompt would hold nothing of what was said.
_JINJA = ("{{", "{%")
# The names by which templates know special tokens.
_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Templates by name, of which "default" is for those who name none; and the texts of special tokens."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """What handing it out takes, without a few bytes for each entry."""
        texts = (*self.sources.items(), *self.special_tokens.items())
        return sum(len(text.encode()) for pair in texts for text in pair)


def read_chat_template(directory: Path, max_bytes: int) -> ChatTemplate | None:
    """The template of a directory, or None where there is none.

    As in transformers, chat_template.jinja wins over what tokenizer_config.json has. What takes more than
    `max_bytes` could not be handed out: it is left out, and the log says so.

    Raises:
        ModelError: A file is not what it should be; the message names it, and the setting.
    """
    max_bytes = min(max_bytes, MAX_BYTES)
    settings = _read_settings(directory)
    sources = _read_file(directory / TEMPLATE_FILE, max_bytes)
    file = directory / TOKENIZER_CONFIG_FILE
    try:
        if sources is None:
            sources = _sources(settings.get("chat_template"))
        if not any(sources.values()):
            return None
        template = ChatTemplate(sources, _special_tokens(settings))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except RecursionError:  # from quoting a value that is nested as deeply as can just be parsed
        raise ModelError(f"{file}: is nested too deeply") from None
    if template.nbytes > max_bytes:
        _warn(directory, template.nbytes, max_bytes)
        return None
    return template


def _read_settings(directory: Path) -> Mapping[str, object]:
    file = directory / TOKENIZER_CONFIG_FILE
    if not is_there(file):
        return {}
    return parse_object(read_whole(file, _MAX_CONFIG_BYTES), file)


def _read_file(file: Path, max_bytes: int) -> dict[str, str] | None:
    """The file's text as the only template, empty if it is too large; None where there is no file."""
    if not is_there(file):
        return None
    with open_regular(file) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
    if size_bytes > max_bytes:
        _warn(file, size_bytes, max_bytes)
        return {}
    try:
        source = read_whole(file, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: is not UTF-8: {error}") from None
    # A link may lead to any file of this machine, and callers are told what it holds.
    if source.strip() and not any(mark in source for mark in _JINJA):
        raise ModelError(f"{file}: is no template: it has neither {' nor '.join(_JINJA)}")
    return {DEFAULT: source}


def _sources(value: object) -> dict[str, str]:
    """One template, or several by name. Raises ModelError."""
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    sources: dict[str, str] = {}
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {}
        name, source = fields.get("name"), fields.get("template")
        if not (_is_text(name) and _is_text(source)) or name in sources:
            raise ModelError("chat_template: must be a text, or a list of texts with names that differ")
        sources[str(name)] = str(source)
    return sources


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """The texts of special tokens, which may be objects with more about them. Raises ModelError."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not _is_text(text):
            raise ModelError(f"{name}: must be a text, or an object with a text content, got {value!r}")
        tokens[name] = str(text)
    return tokens


def _is_text(value: object) -> bool:
    """Whether it is a string that can be sent: JSON can spell halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _warn(place: Path, size_bytes: int, max_bytes: int) -> None:
    _log.warning(
        "the chat template in %s is too large to be handed out: it has %d bytes, %d are allowed",
        place,
        size_bytes,
        max_bytes,
    )
