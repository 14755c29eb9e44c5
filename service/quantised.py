"""Notices a model directory whose weights are quantised, before a server starts for it.

Workers notice it too, but only once the port listens and torch is loaded. What is unclear is left to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from service.model_names import other_format

_MAX_CONFIG_BYTES = 1 << 20
# A header of safetensors begins with its size. One that is larger is looked at in part.
_SIZE_BYTES, _MAX_HEADER_BYTES = 8, 1 << 20
# Where a config says it: most methods, an older spelling, and MLX.
_SETTINGS = ("quantization_config", "compression_config", "quantization")
# Where a config says how many experts there are, by family.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# What only tensors say: GPTQ and AWQ; compressed-tensors; and 8-bit floats.
_IN_HEADERS = (
    *(b'.qweight"', b'.qzeros"', b'.weight_packed"', b'.weight_scale_inv"'),
    *(b'"F8_E4M3"', b'"F8_E5M2"'),
)
_ADVICE = "use the original model, or one in safetensors format as bfloat16, float16 or float32"


def quantised(directory: Path) -> str:
    """What is quantised, and what to use instead; "" if nothing seems to be."""
    try:
        names = [file.name for file in directory.iterdir()]
    except OSError:
        return ""
    settings = _settings(directory)
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights and (problem := other_format(names)):
        return problem
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict) and (found := next(filter(part.get, _SETTINGS), "")):
            method = _method(part[found])
            return f"its weights are quantised ({method}, says {found} of config.json): {_ADVICE}"
    if weights and any(mark in _header(directory / weights[0]) for mark in _IN_HEADERS):
        return f"its weights are quantised, by the tensors of {weights[0]}: {_ADVICE}"
    return ""


def has_experts(directory: Path) -> bool:
    """Whether a config says that the model is a mixture of experts, which cannot be quantised at load yet."""
    settings = _settings(directory)
    parts = (settings, settings.get("text_config") or {})
    return any(isinstance(part, Mapping) and any(map(part.get, _EXPERTS)) for part in parts)


def _settings(directory: Path) -> Mapping[str, object]:
    """The config of a model; empty if it cannot be read."""
    try:
        with (directory / "config.json").open("rb") as file:
            settings = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _method(said: object) -> str:
    """The name of a method, which a directory may spell in any way."""
    name = said.get("quant_method", said.get("quant_algo")) if isinstance(said, Mapping) else None
    return name if isinstance(name, str) and name.isidentifier() else "in some way"


def _header(file: Path) -> bytes:
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_SIZE_BYTES), "little")
            return opened.read(min(size, _MAX_HEADER_BYTES))
    except OSError:
        return b""
