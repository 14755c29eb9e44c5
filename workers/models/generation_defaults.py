"""Reads generation_config.json: the end tokens, and the sampling settings that a model's makers recommend.

Clients receive the settings; the server does not apply them. One outside of the range of requests is left out
with a warning in the log, and never refuses the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from workers.models.errors import ModelError
from workers.models.files import errors_naming, exists, parse_object, read_file
from workers.models.values import boolean, token_ids

_log = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"

_MAX_FILE_BYTES = 1 << 20
_SMALLEST = 2.0**-126  # the smallest normal float32
# The ranges of requests.
_BOUNDS: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "from 0 to 100"),
    "top_p": (_SMALLEST, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (_SMALLEST, 10.0, "above 0 and at most 10"),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Settings, with the names that requests use; None: there is no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_end_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The end tokens, which as in transformers replace those of config.json; empty if there are none.

    Raises:
        ModelError: The file is not a JSON object, or the tokens are invalid.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not exists(file):
        return ()
    settings = parse_object(read_file(file, _MAX_FILE_BYTES), file)
    with errors_naming(file):
        return token_ids(settings, "eos_token_id", vocab_size)


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """The settings in generation_config.json; all None if there is no such file.

    As in transformers, sampling is greedy without `do_sample`, whatever the other settings are; with it the
    default temperature is 1.

    Raises:
        ModelError: The file is not a JSON object.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not exists(file):
        return SamplingDefaults()
    settings = parse_object(read_file(file, _MAX_FILE_BYTES), file)
    do_sample = _usable(file, "do_sample", lambda: boolean(settings, "do_sample", default=False))
    found = {name: _usable(file, name, partial(_number, settings, name)) for name in _BOUNDS}
    penalty = found["repetition_penalty"]
    if not do_sample:
        return SamplingDefaults(repetition_penalty=penalty)
    temperature = 1.0 if found["temperature"] is None else found["temperature"]
    top_k = _usable(file, "top_k", lambda: _top_k(settings))
    return SamplingDefaults(temperature, top_k, found["top_p"], found["min_p"], penalty)


def _usable(file: Path, name: str, read: Callable[[], T]) -> T | None:
    """The result of `read`; None, with a warning in the log, if the setting is invalid."""
    try:
        return read()
    except ModelError as error:
        _log.warning("%s: %s: it is left out", file, error)
    except RecursionError:  # repr() of a value that is nested almost as deeply as the parser allows
        _log.warning("%s: %s: is nested too deeply: it is left out", file, name)
    return None


def _number(settings: Mapping[str, object], name: str) -> float | None:
    """A number within the bounds of its name, or None. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        return None
    minimum, maximum, allowed = _BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ModelError(f"{name}: must be a number {allowed}, got {value!r}")
    return float(value)


def _top_k(settings: Mapping[str, object]) -> int | None:
    """The number of tokens, 0 for all, or None. Raises ModelError."""
    value = settings.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ModelError(f"top_k: must be a whole number from 0, got {value!r}")
    return value
