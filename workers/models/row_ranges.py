"""A stored tensor that consists of some rows of another one."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.weight_formats import WeightFormat
from workers.models.checkpoint import Staging, StoredTensor
from workers.models.parts import Part


class RowRanges(StoredTensor):
    """Rows of a matrix, or elements of a vector, in one or more ranges, one after the other."""

    def __init__(self, within: StoredTensor, *ranges: range) -> None:
        """No range may be empty. Ranges may have a step."""
        self._within, self._ranges = within, ranges
        self.name, self.file, self.dtype, self.begin = within.name, within.file, within.dtype, within.begin
        self.shape = sum(map(len, ranges)), *within.shape[1:]
        self.nbytes = within.nbytes // within.shape[0] * self.shape[0]

    @property
    def form(self) -> WeightFormat | None:
        return self._within.form

    def parts(self, rows: range | None = None, staging: Staging | None = None) -> Iterator[tuple[int, Part]]:
        first, wanted = 0, range(self.shape[0]) if rows is None else rows
        for own in self._ranges:
            begin, end = max(wanted.start, first), min(wanted.stop, first + len(own))
            taken = own[begin - first : max(begin, end) - first]
            first += len(own)
            if not taken:
                continue
            for at, part in self._within.parts(range(taken.start, taken[-1] + 1), staging):
                skipped = (taken.start - at) % taken.step
                yield begin + (at + skipped - taken.start) // taken.step, part[skipped :: taken.step]

    def samples(self) -> Iterator[bytes]:
        return self._within.samples()
