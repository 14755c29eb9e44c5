"""Reads steering vectors (control vectors): adapters that add to the residual stream after layers.

It has the files of an adapter. adapter_config.json has the peft_type STEERING_VECTOR and may have a
`strength`. adapter_model.safetensors has a tensor direction.N for each steered layer, counted from 0, as
llama.cpp's files for --control-vector: https://github.com/ggml-org/llama.cpp (common_control_vector_load).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from workers.adapters.config import CONFIG_FILE, signed_number
from workers.adapters.errors import AdapterError, errors_of_file, quoted
from workers.adapters.tensors import WEIGHTS_FILE, read_scaled
from workers.models.checkpoint import DTYPES, TensorEntry, read_header
from workers.models.files import read_object

STEERING = "STEERING_VECTOR"
_KEYS = {"peft_type", "strength", "base_model_name_or_path"}
_NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,5})")
_MAX_HEADER_BYTES = 1 << 20


def read_strength(directory: Path) -> float | None:
    """The factor of a directory's vectors. None: it is an adapter of another kind. Raises AdapterError."""
    file = directory / CONFIG_FILE
    with errors_of_file(file):
        settings = read_object(file)
        if settings.get("peft_type") != STEERING:
            return None
        for name in sorted(settings.keys() - _KEYS):
            raise AdapterError(f"{quoted(name)}: is not known of a steering vector")
        return signed_number("strength", settings.get("strength", 1.0))


def read_steering(
    directory: Path, shape: tuple[int, int] | None, *, strength: float, max_bytes: int
) -> Mapping[int, torch.Tensor]:
    """Read the vectors as float32 [C], by layer.

    Args:
        directory: The adapter.
        shape: The numbers of layers and of elements; None: the model takes no steering vectors.
        strength: The factor of each vector.
        max_bytes: The most memory that all vectors may take.

    Raises:
        AdapterError: They are not safetensors, or do not fit the model.
    """
    if shape is None:
        raise AdapterError("steering vectors need a native model on a CPU, which is not split over ranks")
    layers, width = shape
    if 4 * layers * width > max_bytes:
        raise AdapterError(f"needs {-(-4 * layers * width >> 20)} MiB, and {max_bytes >> 20} MiB are allowed")
    file = directory / WEIGHTS_FILE
    with errors_of_file(file):
        entries = read_header(file, _MAX_HEADER_BYTES)
        if not entries:
            raise AdapterError("has no tensor direction.N")
        found = {_layer(name, entry, layers, width): entry for name, entry in entries.items()}
        return {layer: read_scaled(entry, strength) for layer, entry in found.items()}


def _layer(name: str, entry: TensorEntry, layers: int, width: int) -> int:
    """The layer of a tensor. Raises AdapterError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AdapterError(f"tensor {quoted(name)}: is not a direction.N")
    layer = int(match[1])
    if layer >= layers:
        raise AdapterError(f"tensor {quoted(name)}: the model's last layer is {layers - 1}")
    if entry.dtype not in DTYPES or math.prod(entry.shape) != width or len(entry.shape) != 1:
        got = f"{quoted(entry.dtype)} {list(entry.shape)}"
        raise AdapterError(f"tensor {quoted(name)}: must be [{width}] of numbers, got {got}")
    return layer
