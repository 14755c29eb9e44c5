"""A model and its draft model with seeded random weights: the draft model is its first layers.

What the other layers add is scaled down, so that both mostly choose the same token. Their time is the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.shapes import Shape
from benchmarks.weights import Bits, bfloat16, make_model, new_model, read_model

# An embedding is no large part of a small model then.
_VOCAB_SIZE = 8192
_SCALE = 1 / 32
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def make_pair(shape: Shape, draft_layers: int, cache_dir: Path) -> tuple[Path, Path, Shape]:
    """The directories of a model and of its draft model, created if needed, and the shape of the model."""
    shape = dataclasses.replace(shape, name=f"{shape.name}-{_VOCAB_SIZE}", vocab_size=_VOCAB_SIZE)
    directory = make_model(shape, cache_dir)
    found = []
    for layers in (shape.num_hidden_layers, draft_layers):
        found.append(cache_dir / f"{shape.name}-draft{draft_layers}-{layers}")
        if not found[-1].is_dir():
            made = dataclasses.replace(shape, num_hidden_layers=layers)
            tensors = dict(_tensors(directory, layers, draft_layers))
            with new_model(found[-1], made, {name: bits.shape for name, bits in tensors.items()}) as file:
                for bits in tensors.values():
                    np.ascontiguousarray(bits).tofile(file)
    return found[0], found[1], shape


def _tensors(directory: Path, layers: int, unscaled: int) -> Iterator[tuple[str, Bits]]:
    for name, bits in read_model(directory):
        layer = _LAYER.match(name)
        index = int(layer[1]) if layer else -1
        if index >= layers:
            continue
        if index >= unscaled and name.endswith(("o_proj.weight", "down_proj.weight")):
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            yield name, bfloat16(values * np.float32(_SCALE))
        else:
            yield name, bits
