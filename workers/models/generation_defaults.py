"""Reads generation_config.json: the end tokens, and the sampling settings that a model's makers recommend.

Clients receive the settings; the server does not apply them. A setting outside the range of requests is left
out with a warning in the log, and never refuses the model.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from quire.v1.sampling_settings import SETTINGS, Setting

from workers.models.errors import ModelError
from workers.models.files import errors_naming, exists, read_object
from workers.models.values import boolean, token_ids

_log = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"

T = TypeVar("T")


def read_end_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The end tokens, which as in transformers replace those of config.json; empty if there are none.

    Raises ModelError if the file is not a JSON object, or the tokens are invalid.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not exists(file):
        return ()
    settings = read_object(file)
    with errors_naming(file):
        return token_ids(settings, "eos_token_id", vocab_size)


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """The settings in generation_config.json, by the names that requests use; empty if there is no such file.

    As in transformers, sampling is greedy without `do_sample`, even if other settings are there; with it the
    default temperature is 1.

    Raises ModelError if the file is not a JSON object.
    """
    file = directory / GENERATION_CONFIG_FILE
    if not exists(file):
        return {}
    settings = read_object(file)
    do_sample = _usable(file, "do_sample", lambda: boolean(settings, "do_sample", default=False))
    found = {"temperature": 1.0} if do_sample else {}
    for setting in SETTINGS:
        # Penalties also have an effect on greedy sampling.
        if do_sample or setting.name.endswith("_penalty"):
            value = _usable(file, setting.name, partial(_value, settings, setting))
            if value is not None:
                found[setting.name] = value
    return found


def _usable(file: Path, name: str, read: Callable[[], T]) -> T | None:
    """The result of `read`; None, with a warning in the log, if the setting is invalid."""
    try:
        return read()
    except ModelError as error:
        _log.warning("%s: %s: it is left out", file, error)
    except RecursionError:  # repr() of a value that is nested almost as deeply as the parser allows
        _log.warning("%s: %s: is nested too deeply: it is left out", file, name)
    return None


def _value(settings: Mapping[str, object], setting: Setting) -> float | None:
    """The value of a setting, or None. Raises ModelError for one that no request could have."""
    value = settings.get(setting.name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not _can_be_sent(setting, value):
        what = "number" if setting.type is float else "whole number"
        raise ModelError(f"{setting.name}: must be a {what} {setting.allowed}, got {value!r}")
    return setting.type(value)


def _can_be_sent(setting: Setting, value: float) -> bool:
    """Whether a request can have this value. Very small values become 0 as float32."""
    if setting.type is int:
        return isinstance(value, int) and setting.allows(value)
    try:
        return setting.allows(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return False
