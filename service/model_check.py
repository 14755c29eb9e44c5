"""Notices weights that are quantised in a way that workers refuse, before a server starts or downloads them.

What else workers refuse they notice themselves, once the port listens and torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from service.model_names import other_format
from workers.common.quantised.methods import read_quantisation
from workers.common.quantised.scheme import NotUnderstood

_MAX_CONFIG_BYTES = 1 << 20
# A header of safetensors begins with its size. One that is larger is looked at in part.
_SIZE_BYTES, _MAX_HEADER_BYTES = 8, 1 << 20
# What only tensors say: GPTQ and AWQ; compressed-tensors; bitsandbytes; and 8-bit floats.
_IN_HEADERS = (
    *(b'.qweight"', b'.qzeros"', b'.weight_packed"', b'.weight_scale_inv"'),
    *(b'.weight.absmax"', b'.SCB"', b'"F8_E4M3"', b'"F8_E5M2"'),
)
_ADVICE = "use the original model, or one in a format of docs/models.md"


def quantised(directory: Path) -> str:
    """How weights are quantised that cannot be served, and what to use instead; "": that is not so."""
    try:
        names = [file.name for file in directory.iterdir()]
    except OSError:
        return ""
    settings = _settings(directory)
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights and (problem := other_format(names)):
        return problem
    try:
        said = read_quantisation(settings)
    except NotUnderstood as error:
        return f"its weights are quantised, and config.json says {error}: {_ADVICE}"
    if said is None and weights and any(mark in _header(directory / weights[0]) for mark in _IN_HEADERS):
        marked = f"by the tensors of {weights[0]}, and config.json does not say how"
        return f"its weights are quantised, {marked}: {_ADVICE}"
    return ""


def _settings(directory: Path) -> Mapping[str, object]:
    """The config of a model; empty if it cannot be read."""
    try:
        with (directory / "config.json").open("rb") as file:
            settings = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _header(file: Path) -> bytes:
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_SIZE_BYTES), "little")
            return opened.read(min(size, _MAX_HEADER_BYTES))
    except OSError:
        return b""
