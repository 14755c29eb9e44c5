"""The chat template of a model, as it is handed out to callers. Nothing here renders it.

A template is a program of whoever made the model. To the server it is text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import is_there, open_regular, parse_object, read_whole

_log = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_SUFFIX = ".jinja"
# Templates for other ends than plain chat lie here, each called by its name without the suffix.
TEMPLATE_DIRECTORY = "additional_chat_templates"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Where older directories name their special tokens.
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT = "default"

# The longest that are known have 40 KB.
MAX_BYTES = 1 << 20
# Known models have three at most.
_MAX_TEMPLATES = 100
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

    sources: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What handing it out takes, without a few bytes for each entry."""
        # Special tokens are sent by themselves, too.
        texts = (*self.sources.items(), *self.special_tokens.items(), *self.special_tokens.items())
        return sum(len(text.encode()) for pair in texts for text in pair)


def read_chat_template(directory: Path, max_bytes: int) -> ChatTemplate:
    """The templates of a directory, and its special tokens, which there may be without a template.

    As in transformers, chat_template.jinja and the files of additional_chat_templates win over what
    tokenizer_config.json has; but where they bring no default, that setting does. What takes more than
    `max_bytes` could not be handed out: it is left out, and the log says so.

    Raises:
        ModelError: A file is not what it should be; the message names it, and the setting.
    """
    max_bytes = min(max_bytes, MAX_BYTES)
    config = _read_settings(directory / TOKENIZER_CONFIG_FILE)
    sources = _read_files(directory, max_bytes)
    if DEFAULT not in sources:
        with _naming(directory / TOKENIZER_CONFIG_FILE):
            sources = _sources(config.get("chat_template")) | sources
    sources = {name: source for name, source in sources.items() if source}
    template = ChatTemplate(sources, _read_special_tokens(directory, config))
    if template.nbytes > max_bytes:
        _warn(directory, template.nbytes, max_bytes)
        return ChatTemplate()
    return template


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """A ModelError of what is done meanwhile names the file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except RecursionError:  # from quoting a value that is nested as deeply as can just be parsed
        raise ModelError(f"{file}: is nested too deeply") from None


def _read_settings(file: Path) -> Mapping[str, object]:
    """Those of a file of JSON, none where there is no file. Raises ModelError."""
    if not is_there(file):
        return {}
    return parse_object(read_whole(file, _MAX_CONFIG_BYTES), file)


def _read_files(directory: Path, max_bytes: int) -> dict[str, str]:
    """The templates that are files of their own, by name; empty texts for those that are too large."""
    files = {DEFAULT: directory / TEMPLATE_FILE} if is_there(directory / TEMPLATE_FILE) else {}
    named = _in_order(directory / TEMPLATE_DIRECTORY)
    files |= {file.name.removesuffix(TEMPLATE_SUFFIX): file for file in named}
    return {name: _read_file(file, max_bytes) for name, file in files.items()}


def _in_order(directory: Path) -> list[Path]:
    """The templates in a directory, none where it is not there. Raises ModelError."""
    try:
        files = sorted(directory.glob(f"*{TEMPLATE_SUFFIX}")) if directory.is_dir() else []
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error
    if len(files) > _MAX_TEMPLATES:
        raise ModelError(f"{directory}: holds more than {_MAX_TEMPLATES} templates")
    for file in files:
        if not _is_text(file.name):
            raise ModelError(f"{directory}: {file.name!r} is no name of a template")
    return files


def _read_file(file: Path, max_bytes: int) -> str:
    """The file's text, empty if it is too large. Raises ModelError."""
    with open_regular(file) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
    if size_bytes > max_bytes:
        _warn(file, size_bytes, max_bytes)
        return ""
    try:
        source = read_whole(file, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: is not UTF-8: {error}") from None
    # A link may lead to any file of this machine, and callers are told what it holds.
    if source.strip() and not any(mark in source for mark in _JINJA):
        raise ModelError(f"{file}: is no template: it has neither {' nor '.join(_JINJA)}")
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
        if not (_is_text(name) and _is_text(source)) or name in sources:
            raise ModelError("chat_template: must be a text, or a list of texts with names that differ")
        sources[str(name)] = str(source)
    return sources


def _read_special_tokens(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The texts of special tokens, by what templates call them.

    As in transformers, special_tokens_map.json counts, and wins, where tokenizer_config.json is of the time
    before it described the tokens itself. Raises ModelError.
    """
    named = {TOKENIZER_CONFIG_FILE: config}
    if "added_tokens_decoder" not in config:
        named[SPECIAL_TOKENS_FILE] = _read_settings(directory / SPECIAL_TOKENS_FILE)
    tokens: dict[str, str | None] = {}
    for file, settings in named.items():
        with _naming(directory / file):
            tokens |= {name: _token(settings, name) for name in _SPECIAL_TOKENS if name in settings}
    return {name: text for name, text in tokens.items() if text is not None}


def _token(settings: Mapping[str, object], name: str) -> str | None:
    """The text of a special token, which may be an object with more about it. Raises ModelError."""
    value = settings[name]
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not _is_text(text):
        raise ModelError(f"{name}: must be a text, or an object with a text content, got {value!r}")
    return None if value is None else str(text)


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
