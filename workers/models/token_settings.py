"""The tokens that the files beside tokenizer.json describe, read as transformers' AutoTokenizer reads them.

For tokenizers that are loaded unchanged from tokenizer.json. Classes that build their own tokenizer from its
vocabulary, and the special tokens that such a class has by default, are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from workers.models.errors import ModelError
from workers.models.files import errors_naming, exists, read_object
from workers.models.values import is_text

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The files of special tokens and of the ids of added tokens in older directories.
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

# Lists of added tokens make these files large: the largest known file has 2 MB.
_MAX_CONFIG_BYTES = 16 << 20
# The names that every tokenizer has, in the order in which transformers adds their tokens.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The `__type` of a token's description where other objects are possible.
_TYPE = "AddedToken"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_DESCRIBED, _LEGACY_EXTRA, _EXTRA, _OTHER = (
    "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
    "model_specific_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before all others, as tokenizer.json describes it.

    `normalized` None: not given. Then special tokens are searched for in the original text, and others in the
    normalized text.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def resolved(self) -> AddedToken:
        """The token with a value for `normalized`."""
        return self if self.normalized is not None else replace(self, normalized=not self.special)


# A text without a description is a special token.
Token: TypeAlias = str | AddedToken


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """The settings of tokens in the files.

    Attributes:
        named: Special tokens by the names that templates use; None: the files set it to null.
        extra: Special tokens without names.
        added: Added tokens by their ids.
        is_described: `added` is from tokenizer_config.json, which then describes all added tokens.
    """

    named: Mapping[str, Token | None]
    extra: Sequence[Token]
    added: Mapping[int, AddedToken]
    is_described: bool

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the special tokens with names."""
        return {name: _text(token) for name, token in self.named.items() if token is not None}

    def to_add(self, own: Mapping[int, AddedToken], padding_token: str | None) -> list[AddedToken]:
        """The tokens that transformers adds to a tokenizer, in its order. May include known ones.

        own: the added tokens of tokenizer.json. padding_token: the token of its padding settings.
        """
        known_by = (self.added,) if self.is_described else (self.added, own)
        by_content = {token.content: token for tokens in known_by for token in tokens.values()}
        added = {token_id: token for tokens in known_by for token_id, token in tokens.items()}
        padding = {} if padding_token is None else {"pad_token": padding_token}
        named = _in_order(padding | dict(self.named))
        special = [by_content.get(_text(token), token) for token in named.values() if token is not None]
        found: list[Token] = [token for _, token in sorted(added.items())]
        known = {token.content for token in (*own.values(), *added.values())}
        seen: set[Token] = set()
        for token in (*special, *self.extra):
            same = token if isinstance(token, str) else token.resolved()
            if _text(token) not in known and same not in seen:
                found.append(token)
                seen.add(same)
        texts = set(map(_text, special))
        return [_added(token, is_special=_text(token) in texts) for token in found]


def read_settings(directory: Path) -> dict[str, object]:
    """The content of tokenizer_config.json; empty if there is no file. Raises ModelError."""
    return _read(directory / TOKENIZER_CONFIG_FILE)


def read_token_settings(directory: Path) -> TokenSettings:
    """Read the files of a directory, each of which may be missing.

    Raises ModelError if a file is invalid; the message names the file and the setting.
    """
    settings = read_settings(directory)
    with errors_naming(directory / TOKENIZER_CONFIG_FILE):
        if _LEGACY_EXTRA in settings and not settings.get(_EXTRA):
            settings[_EXTRA] = settings.pop(_LEGACY_EXTRA)
        texts = [name for name, value in settings.items() if _is_other_name(name) and isinstance(value, str)]
        others = {name: settings.pop(name) for name in texts}
        extra = settings.get(_EXTRA)
        if isinstance(extra, dict) and not _is_typed(extra):
            others.update(extra)
            del settings[_EXTRA]
        if others:
            settings[_OTHER] = others
        is_described = _DESCRIBED in settings
        tokens = _tokens(settings)
        added = _described(settings[_DESCRIBED]) if is_described else {}
    if not is_described:
        special_tokens = _read(directory / SPECIAL_TOKENS_FILE)
        with errors_naming(directory / SPECIAL_TOKENS_FILE):
            settings |= _special(special_tokens, settings)
            tokens = _tokens(settings)
        named = (token for name, token in tokens.named.items() if name in _NAMES and token is not None)
        # Tokens under the older name are read too late to apply to added_tokens.json.
        special = {_text(token) for token in (*named, *(tokens.extra if _EXTRA in settings else ()))}
        indexes = _read(directory / ADDED_TOKENS_FILE)
        with errors_naming(directory / ADDED_TOKENS_FILE):
            added = _indexed(indexes, special)
    return replace(tokens, added=added, is_described=is_described)


def _read(file: Path) -> dict[str, object]:
    return read_object(file, _MAX_CONFIG_BYTES) if exists(file) else {}


def _special(given: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of special_tokens_map.json to add to those of tokenizer_config.json."""
    found: dict[str, object] = {}
    for name, value in given.items():
        if name == _EXTRA and isinstance(value, list):
            before = settings.get(_EXTRA)
            found[name] = [*(before if isinstance(before, list) else ()), *map(_as_special, value)]
        elif name == _EXTRA and isinstance(value, dict):
            found[_OTHER] = {**_object(settings.get(_OTHER), _OTHER), **value}
            found[_EXTRA] = None
        else:
            found[name] = _as_special(value)
    return found


def _as_special(value: object) -> object:
    """Marks the description of a token as special. Returns anything else unchanged."""
    if not isinstance(value, dict):
        return value
    return {**value, "special": True, "__type": _TYPE}


def _tokens(settings: Mapping[str, object]) -> TokenSettings:
    """The special tokens among settings. Raises ModelError."""
    named: dict[str, Token | None] = {
        name: _token(settings[name], name) for name in _NAMES if name in settings
    }
    for name, value in settings.items():
        if _is_other_name(name) and (isinstance(value, str) or _is_typed(value)):
            named[name] = _token(value, name)
    for name, value in _object(settings.get(_OTHER), _OTHER).items():
        named[name] = _token(value, name)
    listed = settings.get(_EXTRA, settings.get(_LEGACY_EXTRA))
    if not isinstance(listed, list | None):
        raise ModelError(f"{_EXTRA}: must be a list or an object, got {listed!r}")
    # An object without a type, which transformers refuses, counts as a special token.
    special = (value if _is_typed(value) else _as_special(value) for value in listed or ())
    extra = [token for value in special if (token := _token(value, _EXTRA)) is not None]
    return TokenSettings(_in_order(named), extra, {}, is_described=False)


def _described(value: object) -> dict[int, AddedToken]:
    """Added tokens by their ids, which are the keys. Raises ModelError."""
    found: dict[int, AddedToken] = {}
    for index, given in _object(value, _DESCRIBED).items():
        if not (index.isascii() and index.isdigit() and len(index) <= 10):
            raise ModelError(f"{_DESCRIBED}: must have token ids as keys, got {index!r}")
        token = _token(given, _DESCRIBED)
        if not isinstance(token, AddedToken):
            raise ModelError(f"{_DESCRIBED}: must have objects as values, got {given!r}")
        found[int(index)] = token
    return found


def _indexed(indexes: Mapping[str, object], special: set[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json. Raises ModelError."""
    found: dict[int, AddedToken] = {}
    for content, index in indexes.items():
        if type(index) is not int or not is_text(content):
            raise ModelError(f"must have token ids as values, got {index!r}")
        is_special = content in special
        found[index] = AddedToken(content, normalized=not is_special, special=is_special)
    return found


def _token(value: object, name: str) -> Token | None:
    """A token, which is a string or an object with its content; None: null. Raises ModelError."""
    if value is None:
        return None
    given: Mapping[str, Any] = value if isinstance(value, dict) else {"content": value}
    content = given.get("content")
    if not is_text(content):
        raise ModelError(f"{name}: must be a string, or an object whose content is one, got {value!r}")
    if not isinstance(value, dict):
        return str(content)
    flags = {flag: given[flag] for flag in _FLAGS if given.get(flag) is not None}
    if any(type(flag) is not bool for flag in flags.values()):
        raise ModelError(f"{name}: {', '.join(_FLAGS)} must be true or false, got {value!r}")
    return AddedToken(str(content), **flags)


def added_token(entry: Mapping[str, object]) -> AddedToken | None:
    """An entry of the `added_tokens` of a tokenizer.json; None: the library refuses it."""
    flags = {flag: entry.get(flag) for flag in _FLAGS}
    content = entry.get("content")
    if not isinstance(content, str) or any(type(flag) is not bool for flag in flags.values()):
        return None
    return AddedToken(content, **flags)  # type: ignore[arg-type] # they are


def _added(token: Token, *, is_special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    return (replace(token, special=True) if is_special else token).resolved()


def _in_order(named: Mapping[str, Token | None]) -> dict[str, Token | None]:
    """Sorts the tokens whose names every tokenizer has to the front."""
    return {name: named[name] for name in (*_NAMES, *named) if name in named}


def _is_other_name(name: str) -> bool:
    """Whether a name can be that of a special token of only some models, such as image_token."""
    return name.endswith("_token") and name not in _NAMES


def _is_typed(value: object) -> bool:
    """Whether an object is the description of a token."""
    return isinstance(value, dict) and value.get("__type") == _TYPE


def _object(value: object, name: str) -> dict[str, Any]:
    """An object; null is an empty one. Raises ModelError."""
    if not isinstance(value, dict | None):
        raise ModelError(f"{name}: must be an object, got {value!r}")
    return value or {}


def _text(token: Token) -> str:
    return token if isinstance(token, str) else token.content
