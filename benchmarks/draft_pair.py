"""A model and its draft model with seeded random weights: the draft model is its first layers.

What the other layers add is scaled down, so that both mostly choose the same token. Their time is the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.shapes import ELEMENT_BYTES, Shape
from benchmarks.weights import MODEL_FILE, Bits, bfloat16, make_model, read_model

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
            partial = found[-1].with_name(found[-1].name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            made = dataclasses.replace(shape, num_hidden_layers=layers)
            (partial / "config.json").write_text(json.dumps(made.hf_config(), indent=2) + "\n")
            _write(partial / MODEL_FILE, dict(_tensors(directory, layers, draft_layers)))
            partial.rename(found[-1])
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


def _write(path: Path, tensors: dict[str, Bits]) -> None:
    header, end = {}, 0
    for name, bits in tensors.items():
        begin, end = end, end + ELEMENT_BYTES * math.prod(bits.shape)
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of their element size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            np.ascontiguousarray(bits).tofile(file)
