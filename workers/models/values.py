"""Reads single settings of a config.json, and checks their type and bounds. null counts as absent."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from workers.models.errors import ModelError

_log = logging.getLogger(__name__)

# Several times the sizes of the largest models, so that a wrong config cannot cause a huge allocation.
_MAX = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
}
_MAX_INTEGER = 1 << 24  # float32 represents integers, such as positions, exactly up to here
# The warm-up of a worker runs two different tokens, one after the other.
_MIN = {"vocab_size": 2, "max_position_embeddings": 2}
_MIN_NUMBER, _MAX_NUMBER = 1e-12, 1e12


def names(text: str) -> frozenset[str]:
    """The names in a text, between blanks and newlines."""
    return frozenset(text.split())


def integer(settings: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A positive integer within bounds; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        got = "nothing" if value is None else repr(value)
        raise ModelError(f"{name}: must be a positive integer, got {got}")
    least, most = _MIN.get(name, 1), _MAX.get(name, _MAX_INTEGER)
    if not least <= value <= most:
        raise ModelError(f"{name}: must be from {least} to {most}, got {value}")
    return value


def non_negative_integer(settings: Mapping[str, object], name: str) -> int:
    """An integer that may be 0. Raises ModelError."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{name}: must be an integer >= 0, got {value!r}")
    return value


def number(settings: Mapping[str, object], name: str, default: float | None = None) -> float:
    """A positive number within bounds; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        got = "nothing" if value is None else repr(value)
        raise ModelError(f"{name}: must be a positive number, got {got}")
    if not _MIN_NUMBER <= value <= _MAX_NUMBER:
        raise ModelError(f"{name}: must be from {_MIN_NUMBER} to {_MAX_NUMBER}, got {value!r}")
    return float(value)


def optional_number(settings: Mapping[str, object], name: str) -> float | None:
    """A positive number; None if it is absent, null or 0. Raises ModelError."""
    return number(settings, name) if settings.get(name) else None


def boolean(settings: Mapping[str, object], name: str, *, default: bool) -> bool:
    """True or false; null counts as absent. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{name}: must be true or false, got {value!r}")
    return value


def token_ids(settings: Mapping[str, object], name: str, vocab_size: int) -> tuple[int, ...]:
    """Special tokens of one role: none, one or a list.

    Ids outside the vocabulary are left out, with a warning in the log: the transformers library accepts them
    with a warning, and small test models have them.

    Raises ModelError.
    """
    value = settings.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    known: dict[int, None] = {}
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelError(f"{name}: must be a token id or a list of them, got {value!r}")
        if 0 <= token < vocab_size:
            known[token] = None
        else:
            warn_outside(name, token, vocab_size)
    return tuple(known)


@functools.cache  # a config is read several times, and one warning is enough
def warn_outside(name: str, token: int, vocab_size: int) -> None:
    """Log that a special token is ignored."""
    _log.warning("%s %d is outside the vocabulary of %d tokens and is ignored", name, token, vocab_size)


def positive_numbers(settings: Mapping[str, object], name: str) -> tuple[float, ...]:
    """A list of positive numbers within bounds; empty if it is absent or null. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX["head_dim"]:
        raise ModelError(f"{name}: must be a list of at most {_MAX['head_dim']} numbers, got {value!r}")
    return tuple(number({name: one}, name) for one in value)


def is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can encode: JSON may contain lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
