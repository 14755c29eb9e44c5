"""The page tables of a step of decodes, kept for the next step, which usually has the same sequences."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from workers.kv.sequence import KvSequence, Rows, SequenceColumns

Tables = NDArray[np.int32]
_NONE: Tables = np.zeros((0, 0), np.int32)


class PageTables:
    """The tables of the last step. Reads the columns and sequences of a `KvTable`."""

    def __init__(self, columns: SequenceColumns, in_row: Mapping[int, KvSequence]) -> None:
        self._columns = columns
        self._in_row = in_row
        # The rows of the last step, as bytes, and their `SequenceColumns.changes`.
        self._key = b""
        self._changes: Rows = np.zeros(0, np.int64)
        self._tables = _NONE

    def of(self, rows: Rows) -> Tables:
        """[N, P] int32, the pages of the sequences in these rows, padded with 0. Not to be modified.

        Returns the same array as the last time if nothing has changed, otherwise a new one.
        """
        if not len(rows):
            return _NONE
        changes, key = self._columns.changes[rows], rows.tobytes()
        if key != self._key:
            self._tables = self._joined(rows)
        elif changes.tobytes() != self._changes.tobytes():
            self._tables = self._updated(rows, (changes != self._changes).nonzero()[0].tolist())
        self._key, self._changes = key, changes
        return self._tables

    def _joined(self, rows: Rows) -> Tables:
        pages = [self._in_row[row].pages for row in rows.tolist()]
        width = max(map(len, pages))
        padding = array("i", [0]) * width
        parts = [part for own in pages for part in (own, padding[len(own) :])]
        # One copy of everything: copying each row into a numpy array takes longer.
        return np.frombuffer(bytearray().join(parts), np.int32).reshape(len(rows), width)

    def _updated(self, rows: Rows, changed: list[int]) -> Tables:
        pages = [self._in_row[rows.item(item)].pages for item in changed]
        before = self._tables
        width = max(before.shape[1], *map(len, pages))
        tables = np.zeros((len(rows), width), np.int32)
        tables[:, : before.shape[1]] = before
        for item, own in zip(changed, pages, strict=True):
            tables[item, : len(own)] = own
            tables[item, len(own) :] = 0
        return tables
