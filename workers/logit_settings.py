"""Masks and token counts for penalties, computed once for all rows of a request.

A forward may have hundreds of rows in a step, with the same mask, and histories that grow from row to row. So
a mask is decoded once, and the history is sorted once and counted incrementally, by the new tokens only.

Token ids beyond the vocabulary are ignored. Dimension letters: V vocabulary; N distinct tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.operations import TokenMask

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

    def allowed(self, mask: TokenMask) -> NDArray[np.bool_]:
        """[V] whether each token may be chosen."""
        return np.unpackbits(self.packed(mask), count=self._vocab, bitorder="little").view(np.bool_)

    def _decode(self, mask: TokenMask) -> NDArray[np.uint8]:
        size = (self._vocab + 31) // 32 * 4  # in bytes
        if mask.packed is not None:
            return np.frombuffer(mask.packed[:size].ljust(size, b"\0"), dtype=np.uint8)
        allowed = np.zeros(size * 8, dtype=np.bool_)
        allowed[in_vocabulary(mask.allowed or (), self._vocab)] = True
        return np.packbits(allowed, bitorder="little")


class TokenCounts(NamedTuple):
    """The distinct tokens of a row's history, ascending, and how often each occurs after the prompt.

    Must not be modified. Valid until the next row is counted.
    """

    ids: Ids  # [N]
    recent: Ids  # [N]


class HistoryCounter:
    """Counts the histories of rows. Rows that share one, shorter before longer, are counted incrementally."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._history: Sequence[int] | NDArray[np.integer] | None = None
        self._prompt_len = 0
        self._end = 0

    def count(
        self,
        history: Sequence[int] | NDArray[np.integer],
        prompt_len: int,
        end: int | None = None,
        path: Sequence[int] = (),
    ) -> TokenCounts:
        """Count the tokens of history[:end] and `path`. `recent` counts those from prompt_len on."""
        end = len(history) if end is None else end
        if history is not self._history or prompt_len != self._prompt_len or end < self._end:
            self._start(history, prompt_len, end)
        for i in range(self._end, end):
            index = self._indexes[i]
            self._occurs[index] = True
            self._recent[index] += i >= prompt_len
        self._end = end
        occurs = self._occurs[: self._known]
        counts = TokenCounts(self._ids[: self._known][occurs], self._recent[: self._known][occurs])
        return self._with_path(counts, path, max(0, prompt_len - end)) if path else counts

    def _with_path(self, counts: TokenCounts, path: Sequence[int], prompt_len: int) -> TokenCounts:
        """Add the tokens of `path`, of which the first `prompt_len` are not recent."""
        recent = in_vocabulary(path[prompt_len:], self._vocab)
        ids = np.union1d(counts.ids, in_vocabulary(path, self._vocab))
        recent_counts = np.zeros(len(ids), dtype=np.int64)
        recent_counts[np.searchsorted(ids, counts.ids)] = counts.recent
        np.add.at(recent_counts, np.searchsorted(ids, recent), 1)
        return TokenCounts(ids, recent_counts)

    def _start(self, history: Sequence[int] | NDArray[np.integer], prompt_len: int, end: int) -> None:
        self._history, self._prompt_len, self._end = history, prompt_len, end
        tokens = np.asarray(history, dtype=np.int64)
        # [N] the distinct tokens, and for each token of the history its index among them.
        self._ids, self._indexes = np.unique(tokens, return_inverse=True)
        self._recent = np.bincount(self._indexes[prompt_len:end], minlength=len(self._ids))
        self._occurs = np.zeros(len(self._ids), dtype=np.bool_)
        self._occurs[self._indexes[:end]] = True
        self._known = int(np.searchsorted(self._ids, self._vocab))
