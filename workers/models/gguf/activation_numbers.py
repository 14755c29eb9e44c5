"""The numbers of Apertus' activation, xIELU: GGUF files have them as metadata, and checkpoints as tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from workers.common.gguf.header import Value
from workers.models.checkpoint import Staging, StoredTensor
from workers.models.errors import ModelError

# The shapes of these tensors in a checkpoint. In metadata the names follow "xielu.".
_SHAPES: Mapping[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


class _Number(StoredTensor):
    """One number as a tensor."""

    dtype = "F32"
    begin, nbytes = 0, 4

    def __init__(self, name: str, file: Path, value: float, shape: tuple[int, ...]) -> None:
        self.name, self.file, self.shape = name, file, shape
        self._value = value

    def parts(
        self,
        rows: range | None = None,  # noqa: ARG002 - as in the interface
        staging: Staging | None = None,  # noqa: ARG002 - the same
    ) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, torch.full(self.shape, self._value)

    def samples(self) -> Iterator[bytes]:
        yield struct.pack("<f", self._value)


def activation_numbers(metadata: Mapping[str, Value], file: Path, layers: object) -> dict[str, StoredTensor]:
    """The tensors of all layers, by their names in a checkpoint. Raises ModelError if a number is missing."""
    found: dict[str, StoredTensor] = {}
    for name, shape in _SHAPES.items():
        key = f"xielu.{name}"
        values = metadata.get(key)
        if not isinstance(values, list) or len(values) != layers:
            raise ModelError(f"{file}: {key}: must be a number for each of {layers} layers")
        for layer, value in enumerate(values):
            if not isinstance(value, float):
                raise ModelError(f"{file}: {key}: must be of floats, got {value!r}")
            found[f"model.layers.{layer}.mlp.act_fn.{name}"] = _Number(key, file, value, shape)
    return found
