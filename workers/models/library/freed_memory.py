"""Memory that tensors left behind, given back to the system while a model is loaded."""

from __future__ import annotations

import ctypes

# So often: it takes milliseconds.
_EVERY_BYTES = 128 << 20


class FreedMemory:
    """Counts what is freed: tensors of a few megabytes leave holes, and half of the weights were seen so."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """So many bytes were freed, or soon will be."""
        self._bytes += nbytes
        if self._bytes >= _EVERY_BYTES:
            self._bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
            if trim is not None:
                trim(0)
