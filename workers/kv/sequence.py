"""A sequence of tokens and its pages, and in columns what decodes need of all sequences: one row for each.

So a step of hundreds of decodes takes a few vector operations. `KvTable` is the only writer.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from workers.kv.shared_list import SharedList, TokenList

# The row of a sequence that is not known. Its length is no position.
NO_ROW = 0
_FIRST_ROWS = 64
# Of `KvSequence.shared_until`: there is no such position.
ALL = 1 << 62

Rows = NDArray[np.int64]


class SequenceColumns:
    """The columns, and which rows are in use.

    Attributes:
        lengths: [rows] The committed tokens.
        writable: [rows] The sequence may write the slots before this position, after its committed tokens:
            it has the pages, and no other sequence can see them.
        recent: [rows, page_size] The last tokens by their place in the page; see `KvSequence.token_ids`.
        changes: [rows] How often the pages of a sequence have changed. Never the same number again in a row.
    """

    def __init__(self, page_size: int) -> None:
        self.lengths: Rows = np.full(1, -1)
        self.writable: Rows = np.zeros(1, np.int64)
        self.recent: NDArray[np.uint32] = np.zeros((1, page_size), np.uint32)
        self.changes: Rows = np.zeros(1, np.int64)
        self._free: list[int] = []

    def add(self) -> int:
        """A row for an empty sequence."""
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
        # Of the table when it was created, or when what it is a fork of was.
        self.generation = generation
        # The position from which on the KV is not that of a sequence by itself: see `KvTable.append`.
        self.shared_until = ALL
        # An array, not a list: the garbage collector would visit the items of thousands of forks.
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
        """The committed tokens. The latest ones, of a page that is not full, are first moved to this list."""
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
        """How many of the tokens are in the list. All of those in full pages are."""
        return self._token_ids.length

    @property
    def writable(self) -> int:
        """The position before which slots that hold no token may be written."""
        return max(len(self), self._columns.writable.item(self.row))
