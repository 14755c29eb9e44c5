"""The tensors of a checkpoint, as the transformers library reads them: when it places each, and no sooner.

To the library they look like slices of the safetensors library. Behind them are files whose headers were
checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from workers.models import checkpoint
from workers.models.checkpoint import Entry
from workers.models.errors import ModelError
from workers.models.library.freed_memory import FreedMemory

# In some checkpoints, and computed by the library: rotations; and causal masks, of four dimensions.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias")
_MASKS = (".attn.bias", ".attention.bias")
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


def tensors_to_read(
    entries: Mapping[str, Entry], total_bytes: int, progress: Callable[[int, int], None] | None
) -> dict[str, FileTensor]:
    """Those that are to be read, by name.

    Args:
        entries: All of the checkpoint.
        total_bytes: Of them.
        progress: Told (done_bytes, total_bytes) of what was read, but not of the end.
    """
    done_bytes, freed = 0, FreedMemory()

    def done(nbytes: int) -> None:
        nonlocal done_bytes
        freed.add(nbytes)
        done_bytes += nbytes
        if progress is not None and done_bytes < total_bytes:
            progress(done_bytes, total_bytes)

    return {name: FileTensor(entry, done) for name, entry in entries.items() if not _is_computed(name, entry)}


class FileTensor:
    """A tensor of a checkpoint, read when the library slices it."""

    def __init__(self, entry: Entry, done: Callable[[int], None]) -> None:
        self._entry = entry
        self._done = done

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part of the tensor, of memory of its own. Raises ModelError if it cannot be read."""
        entry = self._entry
        if entry.dtype not in checkpoint.DTYPES:
            known = ", ".join(checkpoint.DTYPES)
            raise ModelError(f"{entry.file}: tensor {entry.name} must be one of {known}, got {entry.dtype}")
        whole = torch.empty(entry.shape, dtype=checkpoint.DTYPES[entry.dtype])
        for first, part in checkpoint.read_parts(entry):
            (whole[first : first + len(part)] if entry.shape else whole).copy_(part)
            self._done(part.nbytes)
            del part  # it maps the file
        return whole[index]

    def get_shape(self) -> list[int]:
        """As of a slice of safetensors."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As of a slice of safetensors."""
        return self._entry.dtype


@contextmanager
def one_by_one() -> Iterator[None]:
    """The library reads a tensor when it places it, rather than all of them ahead: weights are held once."""
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        del os.environ[_ONE_BY_ONE]
        if before is not None:
            os.environ[_ONE_BY_ONE] = before


def _is_computed(name: str, entry: Entry) -> bool:
    return name.endswith(_COMPUTED) or (name.endswith(_MASKS) and len(entry.shape) == 4)
