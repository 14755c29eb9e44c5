"""Masks, decoded once for all rows of a request: a forward may have hundreds in a step, with the same mask.

Token ids beyond the vocabulary are ignored.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from workers.outputs import TokenMask

Ids = NDArray[np.int64]


def in_vocabulary(ids: Collection[int], vocab: int) -> Ids:
    """[n] the ids that are in the vocabulary, in the given order."""
    listed = np.fromiter(ids, dtype=np.int64, count=len(ids))
    return listed[(listed >= 0) & (listed < vocab)]


class Masks:
    """The masks of a step's rows as bits. Each is decoded once."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        # By id, valid as long as the mask is kept here. Comparing masks would cost as much as decoding.
        self._decoded: dict[int, tuple[TokenMask, NDArray[np.uint8]]] = {}

    def packed(self, mask: TokenMask) -> NDArray[np.uint8]:
        """One bit for each token, least significant first, in words of 4 bytes. Missing bits mean forbidden.

        Bits beyond the vocabulary are arbitrary. Must not be modified.
        """
        known = self._decoded.get(id(mask))
        if known is None:
            known = self._decoded[id(mask)] = mask, self._decode(mask)
        return known[1]

    def _decode(self, mask: TokenMask) -> NDArray[np.uint8]:
        size = (self._vocab + 31) // 32 * 4  # in bytes
        if mask.packed is not None:
            return np.frombuffer(mask.packed[:size].ljust(size, b"\0"), dtype=np.uint8)
        allowed = np.zeros(size * 8, dtype=np.bool_)
        allowed[in_vocabulary(mask.allowed or (), self._vocab)] = True
        return np.packbits(allowed, bitorder="little")
