"""Calls the compiled random number generator in philox.cpp."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import library

_ENTRY_POINT = "quire_philox_uniform"
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64)


def can_uniform() -> bool:
    """Whether the kernel is available."""
    return library.available()


def uniform(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same bits as `workers.counter_rng.uniform`. Requires `can_uniform`. Releases the GIL."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    out = np.empty(len(ids), dtype=np.float32)
    library.function(_ENTRY_POINT, _ARGUMENTS)(out.ctypes.data, ids.ctypes.data, len(ids), key)
    return out
