"""What the readers of settings are given of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.common.gguf.header import TensorInfo, Value

ReadFactors = Callable[[TensorInfo], list[float]]
"""Reads a vector of float32."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """A file: its architecture, the keys under that, the settings read so far, and its tensors."""

    name: str
    own: Mapping[str, Value]
    settings: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    read_factors: ReadFactors

    @property
    def window(self) -> Value | None:
        """The sliding window; None: there is none."""
        return self.own.get("attention.sliding_window") or None

    def has(self, part: str) -> bool:
        """Whether a layer has such a tensor."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self.tensors)
