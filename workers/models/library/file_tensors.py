"""The tensors of a checkpoint for the transformers library, each read only when the library places it.

They have the interface of slices of the safetensors library, and read files whose headers were checked.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from workers.models import checkpoint
from workers.models.checkpoint import StoredTensor
from workers.models.errors import ModelError
from workers.models.library.quantised_module import values_of

# Some checkpoints have tensors that the library computes: rotary frequencies, and causal masks of 4
# dimensions.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias")
_MASKS = (".attn.bias", ".attention.bias")
# Weights, and integer tables by token.
_DTYPES = checkpoint.DTYPES | {"I64": torch.int64}
_SEQUENTIAL_ENV = "HF_DEACTIVATE_ASYNC_LOAD"
# The bytes between two calls of malloc_trim, which takes milliseconds.
_INTERVAL_BYTES = 128 << 20


def tensors_to_read(
    entries: Mapping[str, StoredTensor], done: Callable[[int], None]
) -> dict[str, FileTensor]:
    """The tensors that the library does not compute itself, by name. `done`: see `Reads`."""
    return {name: FileTensor(entry, done) for name, entry in entries.items() if not _is_computed(name, entry)}


class FileTensor:
    """A tensor of a checkpoint, read when the library slices it, and dequantised."""

    def __init__(self, entry: StoredTensor, done: Callable[[int], None]) -> None:
        self._entry = entry
        self._done = done

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the tensor; returns a part of it as a new tensor. Raises ModelError if it cannot be read."""
        entry = self._entry
        dtype = torch.float32 if entry.form is not None else _DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(checkpoint.DTYPES)
            raise ModelError(f"{entry.file}: tensor {entry.name} must be one of {known}, got {entry.dtype}")
        whole = torch.empty(entry.shape, dtype=dtype)
        if entry.form is None and whole.nbytes != entry.nbytes:
            raise ModelError(f"{entry.file}: tensor {entry.name} has {entry.nbytes} bytes for {entry.shape}")
        for first, part in entry.parts():
            into = whole[first : first + len(part)] if entry.shape else whole
            if entry.form is None:
                assert isinstance(part, torch.Tensor), "it is not quantised"
                # Parts with a dtype that no weight has are bytes.
                into.copy_(part.view(dtype).view_as(into))
            else:
                # Parts of GGUF files are [rows, bytes of a row].
                rows = part.view(into[..., 0].numel(), -1) if isinstance(part, torch.Tensor) else part
                into.copy_(values_of(entry.form, rows, entry.shape[-1]).view_as(into))
            self._done(part.nbytes)
        return whole[index]

    def get_shape(self) -> list[int]:
        """As in a slice of safetensors."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As in a slice of safetensors."""
        return self._entry.dtype if self._entry.form is None else "F32"


class Reads:
    """The progress of reading a checkpoint.

    Calls malloc_trim regularly. Without it, holes of freed tensors took half the size of the weights.
    """

    def __init__(self, total_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        """`progress`: called with (done_bytes, total_bytes) after each read, except for the end."""
        self._total_bytes, self._progress = total_bytes, progress
        self._done_bytes = self._untrimmed_bytes = 0

    def done(self, nbytes: int) -> None:
        """Count bytes that were read, and are or will soon be freed."""
        self._done_bytes += nbytes
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _INTERVAL_BYTES:
            self._untrimmed_bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)
        if self._progress is not None and self._done_bytes < self._total_bytes:
            self._progress(self._done_bytes, self._total_bytes)


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


def _is_computed(name: str, entry: StoredTensor) -> bool:
    return name.endswith(_COMPUTED) or (name.endswith(_MASKS) and len(entry.shape) == 4)
