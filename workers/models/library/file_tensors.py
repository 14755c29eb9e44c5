"""The tensors of a checkpoint for the transformers library, each read only when the library places it.

They have the interface of slices of the safetensors library, and read files whose headers were checked.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from workers.models import checkpoint
from workers.models.checkpoint import TensorEntry
from workers.models.errors import ModelError

# Some checkpoints have tensors that the library computes: rotary frequencies, and causal masks of 4
# dimensions.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias")
_MASKS = (".attn.bias", ".attention.bias")
# Weights, and tables of what belongs to a token.
_DTYPES = checkpoint.DTYPES | {"I64": torch.int64}
_SEQUENTIAL_ENV = "HF_DEACTIVATE_ASYNC_LOAD"
# The bytes between two calls of malloc_trim, which takes milliseconds.
_INTERVAL_BYTES = 128 << 20


def tensors_to_read(
    entries: Mapping[str, TensorEntry], total_bytes: int, progress: Callable[[int, int], None] | None
) -> dict[str, FileTensor]:
    """The tensors that the library does not compute itself, by name.

    Args:
        entries: All tensors of the checkpoint.
        total_bytes: Their size.
        progress: Called with (done_bytes, total_bytes) after each read, except for the end.
    """
    done_bytes, trimmer = 0, _HeapTrimmer()

    def done(nbytes: int) -> None:
        nonlocal done_bytes
        trimmer.add(nbytes)
        done_bytes += nbytes
        if progress is not None and done_bytes < total_bytes:
            progress(done_bytes, total_bytes)

    return {name: FileTensor(entry, done) for name, entry in entries.items() if not _is_computed(name, entry)}


class FileTensor:
    """A tensor of a checkpoint, read when the library slices it."""

    def __init__(self, entry: TensorEntry, done: Callable[[int], None]) -> None:
        self._entry = entry
        self._done = done

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the tensor; returns a part of it as a new tensor. Raises ModelError if it cannot be read."""
        entry, dtype = self._entry, _DTYPES.get(self._entry.dtype)
        if dtype is None:
            known = ", ".join(checkpoint.DTYPES)
            raise ModelError(f"{entry.file}: tensor {entry.name} must be one of {known}, got {entry.dtype}")
        if math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
            raise ModelError(f"{entry.file}: tensor {entry.name} has {entry.nbytes} bytes for {entry.shape}")
        whole = torch.empty(entry.shape, dtype=dtype)
        flat, width = whole.view(-1), math.prod(entry.shape[1:])
        for first, part in checkpoint.read_parts(entry):
            elements = part.reshape(-1).view(dtype)
            flat[first * width :][: len(elements)].copy_(elements)
            self._done(part.nbytes)
        return whole[index]

    def get_shape(self) -> list[int]:
        """As in a slice of safetensors."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As in a slice of safetensors."""
        return self._entry.dtype


class _HeapTrimmer:
    """Calls malloc_trim regularly. Without it, holes of freed tensors took half the size of the weights."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed, or will be soon."""
        self._bytes += nbytes
        if self._bytes >= _INTERVAL_BYTES:
            self._bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)


@contextmanager
def sequential_reads() -> Iterator[None]:
    """Make the library read each tensor only when it places it, so that weights are in memory once."""
    before = os.environ.get(_SEQUENTIAL_ENV)
    os.environ[_SEQUENTIAL_ENV] = "1"
    try:
        yield
    finally:
        del os.environ[_SEQUENTIAL_ENV]
        if before is not None:
            os.environ[_SEQUENTIAL_ENV] = before


def _is_computed(name: str, entry: TensorEntry) -> bool:
    return name.endswith(_COMPUTED) or (name.endswith(_MASKS) and len(entry.shape) == 4)
