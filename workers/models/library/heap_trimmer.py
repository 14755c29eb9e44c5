"""Returns freed memory to the system while a model is loaded."""

from __future__ import annotations

import ctypes

# The bytes between two calls of malloc_trim, which takes milliseconds.
_INTERVAL_BYTES = 128 << 20


class HeapTrimmer:
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
