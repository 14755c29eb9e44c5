"""How a model's makers draw from it, by generation_config.json: told to callers, never applied.

The tokens that end a text are read by `config`, since they are the model's and not a way of drawing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.models.errors import ModelError
from workers.models.files import is_there, parse_object, read_whole
from workers.models.values import boolean

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
        ModelError: It is not a file of JSON, or a setting cannot be used; the message names both.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not is_there(file):
        return SamplingDefaults()
    settings = parse_object(read_whole(file, _MAX_FILE_BYTES), file)
    try:
        return _defaults(settings)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except RecursionError:  # from quoting a value that is nested as deeply as can just be parsed
        raise ModelError(f"{file}: is nested too deeply") from None


def _defaults(settings: Mapping[str, object]) -> SamplingDefaults:
    # Each is looked at, also where it does not count: a file that is wrong is not believed by halves.
    draws = boolean(settings, "do_sample", default=False)
    found = {name: _number(settings, name) for name in _BOUNDS}
    top_k = _top_k(settings)
    penalty = found["repetition_penalty"]
    if not draws:
        return SamplingDefaults(repetition_penalty=penalty)
    temperature = 1.0 if found["temperature"] is None else found["temperature"]
    return SamplingDefaults(temperature, top_k, found["top_p"], found["min_p"], penalty)


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
