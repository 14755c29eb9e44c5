"""How a model's makers draw from it, by generation_config.json: told to callers, never applied.

It is advice, and no model is refused for bad advice: a setting that no request could ask for is left out, and
the log says so. The tokens that end a text are read by `config`, since they are the model's and not a way of
drawing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from workers.models.errors import ModelError
from workers.models.files import is_there, parse_object, read_whole
from workers.models.values import boolean

_log = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"

_MAX_FILE_BYTES = 1 << 20
_LEAST = 2.0**-126  # above 0, also as a 32-bit float
# What a request may ask for, and so what can be recommended.
_BOUNDS: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "from 0 to 100"),
    "top_p": (_LEAST, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (_LEAST, 10.0, "above 0 and at most 10"),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Settings by the names that requests have for them; None: the model's makers do not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """What generation_config.json says; nothing where there is none.

    As in transformers: without `do_sample` the most likely token is taken, whatever the settings of a draw
    are, and with it a temperature that is not given is 1.

    Raises:
        ModelError: It is not a file of JSON.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not is_there(file):
        return SamplingDefaults()
    settings = parse_object(read_whole(file, _MAX_FILE_BYTES), file)
    draws = _usable(file, "do_sample", lambda: boolean(settings, "do_sample", default=False))
    found = {name: _usable(file, name, partial(_number, settings, name)) for name in _BOUNDS}
    penalty = found["repetition_penalty"]
    if not draws:
        return SamplingDefaults(repetition_penalty=penalty)
    temperature = 1.0 if found["temperature"] is None else found["temperature"]
    top_k = _usable(file, "top_k", lambda: _top_k(settings))
    return SamplingDefaults(temperature, top_k, found["top_p"], found["min_p"], penalty)


def _usable(file: Path, name: str, read: Callable[[], T]) -> T | None:
    """What `read` reads of a setting; None if it cannot be used, which is logged."""
    try:
        return read()
    except ModelError as error:
        _log.warning("%s: %s: it is left out", file, error)
    except RecursionError:  # from quoting a value that is nested as deeply as can just be parsed
        _log.warning("%s: %s: is nested too deeply: it is left out", file, name)
    return None


def _number(settings: Mapping[str, object], name: str) -> float | None:
    """A number within the bounds of its name, or None. Raises ModelError."""
    value = settings.get(name)
    if value is None:
        return None
    least, most, allowed = _BOUNDS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ModelError(f"{name}: must be a number {allowed}, got {value!r}")
    return float(value)


def _top_k(settings: Mapping[str, object]) -> int | None:
    """So many tokens, 0 for all, or None. Raises ModelError."""
    value = settings.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ModelError(f"top_k: must be a whole number from 0, got {value!r}")
    return value
