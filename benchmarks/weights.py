"""Makes the Hugging Face directory of a shape, with seeded random bfloat16 weights, once.

This module writes the safetensors file itself, one tensor at a time, so that it needs neither torch nor the
memory of the model. To draw a value it looks up 16 random bits in a table of the normal distribution's
quantiles. That takes seconds for 600 million values; torch takes minutes for bfloat16.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import IO

import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import ELEMENT_BYTES, Shape

SEED = 20_260
MODEL_FILE = "model.safetensors"
# Part of the directory's name. Increment it when the same shape and seed give other weights.
_VERSION = 1
_PART_ELEMENTS = 1 << 24

Bits = NDArray[np.uint16]


def make_model(shape: Shape, cache_dir: Path) -> Path:
    """The directory of the shape's model, which is created if needed."""
    directory = cache_dir / f"{shape.name}-seed{SEED}-v{_VERSION}"
    if not directory.is_dir():
        sizes = _tensors(shape)
        with new_model(directory, shape, sizes) as file:
            _draw(file, sizes)
    return directory


@contextlib.contextmanager
def new_model(directory: Path, shape: Shape, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[IO[bytes]]:
    """Creates a model's directory atomically. The caller writes the tensors to the file, in this order."""
    header, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + ELEMENT_BYTES * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of their element size
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    with (partial / MODEL_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield file
    partial.rename(directory)


def read_model(directory: Path) -> Iterator[tuple[str, Bits]]:
    """The memory-mapped tensors of a directory with one file, all in bfloat16: their bits."""
    path = directory / MODEL_FILE
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name. The head is the embedding."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    width, kv_width = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.o_proj": (hidden, width),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for index in range(shape.num_hidden_layers):
        found |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return found | {"model.norm.weight": (hidden,)}


def _draw(file: IO[bytes], sizes: Mapping[str, tuple[int, ...]]) -> None:
    normal, parts = NormalDist(), 1 << 16
    # The middles of equally likely parts of the standard normal distribution; within +-4.4.
    quantiles = np.array([normal.inv_cdf((i + 0.5) / parts) for i in range(parts)], dtype=np.float32)
    random = np.random.default_rng(SEED)
    for size in sizes.values():
        # Norms are ones. Matrices are scaled so that activations keep their size from layer to layer.
        table = bfloat16(quantiles * np.float32(size[1] ** -0.5) if size[1:] else np.ones_like(quantiles))
        left = math.prod(size)
        while left:
            count = min(_PART_ELEMENTS, left)
            table[random.integers(0, parts, count, dtype=np.uint16)].tofile(file)
            left -= count


def bfloat16(values: NDArray[np.float32]) -> Bits:
    """The bits of the nearest bfloat16 of finite values, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
