"""Packed decodes (appends of one token) of many rows, sorted by cache and merged into longer appends."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from service.caches.records import TokensAppended
from service.journal.encoding import PACKED_DECODE_BYTES

U32s = NDArray[np.uint32]


class PackedDecodes:
    """The packed decodes of a batch of rows, by cache. N in all.

    `ends`: the number of decodes up to the end of each row. `walls_s`: the time of each row.
    """

    def __init__(self, packed: bytes, ends: list[int], walls_s: list[float]) -> None:
        values = np.frombuffer(packed, "<u4").reshape(-1, PACKED_DECODE_BYTES // 4)  # [N, 5]
        order = _stable_order(values[:, 0])  # [N]
        values = values[order]
        row_of = np.repeat(np.arange(len(ends)), np.diff(np.array([0, *ends])))  # [N]
        # Within a run the position grows by one, and all other values but the token stay the same.
        steps = np.diff(values[:, :4], axis=0) != np.array([0, 1, 0, 0], np.uint32)
        starts = np.flatnonzero(np.concatenate(([len(values) > 0], steps.any(axis=1))))
        self._order = order
        self._heads: list[list[int]] = values[starts, :4].tolist()
        self._tokens = array("I", np.ascontiguousarray(values[:, 4], np.uint32).tobytes())
        self._walls_s, self._row_of = walls_s, row_of
        self._starts: list[int] = [*starts.tolist(), len(values)]
        # For each cache: its first run that is not fully taken, and the start of what is left of it.
        self._next: dict[int, int] = {}
        for index, head in enumerate(self._heads):
            self._next.setdefault(head[0], index)
        self._taken: dict[int, int] = {}

    def of(self, number: int, before: int) -> Iterator[tuple[TokensAppended, float]]:
        """Takes the decodes of a cache among the first `before` of the batch, merged, with their times."""
        run = self._next.get(number)
        while run is not None and run < len(self._heads) and self._heads[run][0] == number:
            start = self._taken.get(number, self._starts[run])
            end = self._starts[run + 1]
            stop = end
            if self._order[end - 1] >= before:
                stop = bisect_left(self._order, before, start, end)
            if stop > start:
                yield self._record(run, start, stop)
            if stop < end:
                self._taken[number] = stop
                return
            self._taken.pop(number, None)
            run += 1
            self._next[number] = run

    def rest(self) -> Iterator[tuple[TokensAppended, float]]:
        """Takes all others."""
        for number in self._next:
            yield from self.of(number, len(self._order))

    def _record(self, run: int, start: int, stop: int) -> tuple[TokensAppended, float]:
        number, position, prompt_len, ownership = self._heads[run]
        position += start - self._starts[run]
        record = TokensAppended(number, position, self._tokens[start:stop], prompt_len, ownership)
        return record, self._walls_s[self._row_of[self._order[stop - 1]]]


def _stable_order(numbers: U32s) -> NDArray[np.intp]:
    """Indexes of a stable sort of `numbers`. Fast if they are close to each other."""
    if len(numbers):
        numbers = numbers - numbers.min()
        if numbers.max() <= np.iinfo(np.uint16).max:
            return np.argsort(numbers.astype(np.uint16), kind="stable")
    return np.argsort(numbers, kind="stable")
