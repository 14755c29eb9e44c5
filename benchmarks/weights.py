"""Makes the Hugging Face directory of a shape, with seeded random bfloat16 weights, once.

The safetensors file is written here and not by a library, one tensor at a time, so that this needs neither
torch nor the memory of the model. Values are drawn by looking up 16 random bits in a table of the normal
distribution's quantiles: seconds for 600 million, where torch takes minutes for bfloat16.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from benchmarks.shapes import ELEMENT_BYTES, Shape

SEED = 20_260
MODEL_FILE = "model.safetensors"
# Part of the directory's name: raise it when the same shape and seed give other weights.
_VERSION = 1
_PART_ELEMENTS = 1 << 24

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor to be made: normal with `std` around 0, or all ones if `std` is 0."""

    name: str
    shape: tuple[int, ...]
    std: float

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


def make_model(shape: Shape, cache_dir: Path) -> Path:
    """The directory of the shape's model, made if it is not there.

    A directory is complete or absent: it is made beside its place and moved.
    """
    directory = cache_dir / f"{shape.name}-seed{SEED}-v{_VERSION}"
    if directory.is_dir():
        return directory
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    _write(partial / MODEL_FILE, matrices(shape))
    partial.rename(directory)
    return directory


def matrices(shape: Shape) -> list[Matrix]:
    """The tensors of a shape, scaled so that activations keep their size from layer to layer."""
    hidden, width = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    kv_width = shape.num_key_value_heads * shape.head_dim
    # The head is the embedding: at this scale logits have a standard deviation of about 1.
    found = [_linear("model.embed_tokens.weight", shape.vocab_size, hidden)]
    for index in range(shape.num_hidden_layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        found += [
            _norm(prefix + "input_layernorm.weight", hidden),
            _linear(attention + "q_proj.weight", width, hidden),
            _linear(attention + "k_proj.weight", kv_width, hidden),
            _linear(attention + "v_proj.weight", kv_width, hidden),
            _norm(attention + "q_norm.weight", shape.head_dim),
            _norm(attention + "k_norm.weight", shape.head_dim),
            _linear(attention + "o_proj.weight", hidden, width),
            _norm(prefix + "post_attention_layernorm.weight", hidden),
            _linear(prefix + "mlp.gate_proj.weight", shape.intermediate_size, hidden),
            _linear(prefix + "mlp.up_proj.weight", shape.intermediate_size, hidden),
            _linear(prefix + "mlp.down_proj.weight", hidden, shape.intermediate_size),
        ]
    return [*found, _norm("model.norm.weight", hidden)]


def read_model(directory: Path) -> Iterator[tuple[str, Bits]]:
    """The tensors of a directory made here, as the bits of bfloat16, mapped from the file."""
    path = directory / MODEL_FILE
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def _linear(name: str, rows: int, columns: int) -> Matrix:
    return Matrix(name, (rows, columns), columns**-0.5)


def _norm(name: str, width: int) -> Matrix:
    return Matrix(name, (width,), 0.0)


def _write(path: Path, tensors: list[Matrix]) -> None:
    header, end = {}, 0
    for tensor in tensors:
        begin, end = end, end + ELEMENT_BYTES * tensor.size
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of their element size
    random, quantiles = np.random.default_rng(SEED), _normal_quantiles()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            table = to_bfloat16(quantiles * np.float32(tensor.std) if tensor.std else np.ones_like(quantiles))
            for first in range(0, tensor.size, _PART_ELEMENTS):
                count = min(_PART_ELEMENTS, tensor.size - first)
                table[random.integers(0, 1 << 16, count, dtype=np.uint16)].tofile(file)


def _normal_quantiles() -> NDArray[np.float32]:
    """The middles of 2^16 equally likely parts of the standard normal distribution; within +-4.4."""
    normal, parts = NormalDist(), 1 << 16
    return np.array([normal.inv_cdf((i + 0.5) / parts) for i in range(parts)], dtype=np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """The bits of the nearest bfloat16 of finite values, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
