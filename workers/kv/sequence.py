"""A sequence of tokens and its pages; and the columns with what decodes need, which have a row per sequence.

So a step of hundreds of decodes takes a few vector operations. `KvTable` is the only writer.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from workers.kv.shared_list import SharedList, TokenList

# The row of unknown sequences. Its length matches no position.
NO_ROW = 0
_FIRST_ROWS = 64
# `KvSequence.shared_until` if all pages may be shared.
ALL = 1 << 62

Rows = NDArray[np.int64]


class SequenceColumns:
    """The columns, and which rows are in use.

    Attributes:
        lengths: [rows] int64, the number of committed tokens.
        writable: [rows] int64. The slots after the committed tokens and before this position may be written:
            they are reserved, and no other sequence can see them.
        recent: [rows, page_size] uint32, the last tokens by their offset in the page; see
            `KvSequence.token_ids`.
        changes: [rows] int64, a counter that is incremented when the pages of the row's sequence change, or
            another sequence gets the row.
    """

    def __init__(self, page_size: int) -> None:
        self.lengths: Rows = np.full(1, -1)
        self.writable: Rows = np.zeros(1, np.int64)
        self.recent: NDArray[np.uint32] = np.zeros((1, page_size), np.uint32)
        self.changes: Rows = np.zeros(1, np.int64)
        self._free: list[int] = []

    def add(self) -> int:
        """Return the row of a new, empty sequence."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.lengths[row] = self.writable[row] = 0
        self.changes[row] += 1
        return row

    def remove(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def _grow(self) -> None:
        rows = len(self.lengths)
        more = max(rows, _FIRST_ROWS)
        self.lengths = np.concatenate([self.lengths, np.full(more, -1)])
        self.writable = np.concatenate([self.writable, np.zeros(more, np.int64)])
        self.recent = np.concatenate([self.recent, np.zeros((more, self.recent.shape[1]), np.uint32)])
        self.changes = np.concatenate([self.changes, np.zeros(more, np.int64)])
        self._free = list(range(rows + more - 1, rows - 1, -1))


class KvSequence:
    """One sequence. Only `KvTable` changes it. Invalid after `release`."""

    __slots__ = (
        "_columns", "_token_ids", "digests", "generation", "key", "pages", "row", "salt", "shared_until",
    )  # fmt: skip

    def __init__(self, key: int, salt: bytes, generation: int, columns: SequenceColumns) -> None:
        self.key = key
        self.salt = salt
        # The table's generation when it, or the sequence it was forked from, was created.
        self.generation = generation
        # Pages that end after this position are shared only with forks: see `own` of `KvTable.append`.
        self.shared_until = ALL
        # An array, since the garbage collector would visit all items of lists.
        self.pages: array[int] = array("i")
        self.digests: SharedList[bytes] = SharedList()
        self.row = columns.add()
        self._columns = columns
        self._token_ids = TokenList()

    def __len__(self) -> int:
        """Return the number of committed tokens."""
        return self._columns.lengths.item(self.row)

    def __bool__(self) -> bool:
        # `if table.get(key)` must not take an empty sequence for a missing one.
        return True

    @property
    def token_ids(self) -> TokenList:
        """The committed tokens. Moves the latest ones from `recent` to this list first."""
        known, length = self._token_ids, len(self)
        if known.length < length:
            recent, size = self._columns.recent[self.row], self._columns.recent.shape[1]
            known.extend(recent[known.length % size : (length - 1) % size + 1].tolist())
        return known

    @token_ids.setter
    def token_ids(self, tokens: TokenList) -> None:
        self._token_ids = tokens
        self._columns.lengths[self.row] = tokens.length

    @property
    def listed(self) -> int:
        """How many tokens are in the list: at least those of all full pages."""
        return self._token_ids.length

    @property
    def writable(self) -> int:
        """Slots from the end of the sequence up to this position may be written."""
        return max(len(self), self._columns.writable.item(self.row))
