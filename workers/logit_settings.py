"""What masks and penalties need of a request, made once for all its rows.

A forward may have hundreds of rows in a step, and all of them one mask and one history, of which each row
sees some more tokens. So a mask is decoded once, and a history is sorted once and counted on from row to row:
a row costs what it changes, not what its request is long.

Token ids beyond the vocabulary are passed over. Dimension letters: V vocabulary; N distinct tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.operations import TokenMask

Ids = NDArray[np.int64]


def in_vocabulary(ids: Collection[int], vocab: int) -> Ids:
    """[n] those of the ids that are tokens, in their order."""
    listed = np.fromiter(ids, dtype=np.int64, count=len(ids))
    return listed[(listed >= 0) & (listed < vocab)]


class Masks:
    """The masks of one choice as bits, each decoded once however many rows have it."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        # By identity, which holds as long as the mask is kept here: comparing would cost what decoding does.
        self._decoded: dict[int, tuple[TokenMask, NDArray[np.uint8]]] = {}

    def packed(self, mask: TokenMask) -> NDArray[np.uint8]:
        """One bit a token, least significant first; whole words of 4 bytes. Bits that are missing forbid.

        Bits beyond the vocabulary are arbitrary. Not to be modified.
        """
        known = self._decoded.get(id(mask))
        if known is None:
            known = self._decoded[id(mask)] = mask, self._decode(mask)
        return known[1]

    def allowed(self, mask: TokenMask) -> NDArray[np.bool_]:
        """[V] which tokens may be chosen."""
        return np.unpackbits(self.packed(mask), count=self._vocab, bitorder="little").view(np.bool_)

    def _decode(self, mask: TokenMask) -> NDArray[np.uint8]:
        size = (self._vocab + 31) // 32 * 4  # in bytes
        if mask.packed is not None:
            return np.frombuffer(mask.packed[:size].ljust(size, b"\0"), dtype=np.uint8)
        allowed = np.zeros(size * 8, dtype=np.bool_)
        allowed[in_vocabulary(mask.allowed or (), self._vocab)] = True
        return np.packbits(allowed, bitorder="little")


class TokenCounts(NamedTuple):
    """Tokens of a row's history, each once and ascending, and how often each came after the prompt.

    Not to be modified, and valid until the next row is counted.
    """

    ids: Ids  # [N]
    recent: Ids  # [N]


class HistoryCounter:
    """Counts the histories of rows. Rows that share one, shorter before longer, are counted in one go."""

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
        """The tokens of history[:end] and `path`; `recent` counts those of them from prompt_len on."""
        end = len(history) if end is None else end
        if history is not self._history or prompt_len != self._prompt_len or end < self._end:
            self._start(history, prompt_len, end)
        for i in range(self._end, end):
            place = self._places[i]
            self._came[place] = True
            self._recent[place] += i >= prompt_len
        self._end = end
        came = self._came[: self._known]
        counts = TokenCounts(self._ids[: self._known][came], self._recent[: self._known][came])
        return self._with_path(counts, path, max(0, prompt_len - end)) if path else counts

    def _with_path(self, counts: TokenCounts, path: Sequence[int], prompt_len: int) -> TokenCounts:
        """The same with tokens that follow, of which the first `prompt_len` are not recent."""
        recent = in_vocabulary(path[prompt_len:], self._vocab)
        ids = np.union1d(counts.ids, in_vocabulary(path, self._vocab))
        came = np.zeros(len(ids), dtype=np.int64)
        came[np.searchsorted(ids, counts.ids)] = counts.recent
        np.add.at(came, np.searchsorted(ids, recent), 1)
        return TokenCounts(ids, came)

    def _start(self, history: Sequence[int] | NDArray[np.integer], prompt_len: int, end: int) -> None:
        self._history, self._prompt_len, self._end = history, prompt_len, end
        tokens = np.asarray(history, dtype=np.int64)
        # [N] every token that will be counted, and for each of the history's which one it is.
        self._ids, self._places = np.unique(tokens, return_inverse=True)
        self._recent = np.bincount(self._places[prompt_len:end], minlength=len(self._ids))
        self._came = np.zeros(len(self._ids), dtype=np.bool_)
        self._came[self._places[:end]] = True
        self._known = int(np.searchsorted(self._ids, self._vocab))
