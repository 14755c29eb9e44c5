"""A list whose copies share what they have in common, so that a thousand forks of a long prompt cost little.

    full  [ 1024 items | 1024 items ]   never changed once they are here, so copies refer to the same ones
    tail  [ the rest ]                  of this list alone

A copy costs a reference for each chunk and the items of the tail. Items come and go at the end only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

CHUNK = 1024

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list of T in chunks. Equal to any sequence with equal items. Owned by one writer.

    `length` is its length, quicker to read than by `len`.
    """

    __slots__ = ("_full", "_tail", "length")

    def __init__(self) -> None:
        self._full: list[Any] = []
        self._tail: Any = self._empty()
        self.length = 0

    def _empty(self) -> Any:
        return []

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return an item, or a list of some: O(those) and a little more."""
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            found: list[T] = []
            while start < end:
                chunk, offset = divmod(start, CHUNK)
                items = self._full[chunk] if chunk < len(self._full) else self._tail
                found += items[offset : offset + end - start]
                start += min(CHUNK - offset, end - start)
            return found
        length = self.length
        if not -length <= index < length:
            raise IndexError(index)
        chunk, offset = divmod(index % length, CHUNK)
        item: T = (self._full[chunk] if chunk < len(self._full) else self._tail)[offset]
        return item

    def __iter__(self) -> Iterator[T]:
        for chunk in self._full:
            yield from chunk
        yield from self._tail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def append(self, item: T) -> None:
        """Add an item."""
        self.extend((item,))

    def extend(self, items: Iterable[T]) -> None:
        """Add items."""
        self._tail.extend(items)
        if len(self._tail) >= CHUNK:
            whole = len(self._tail) // CHUNK * CHUNK
            self._full += [self._tail[start : start + CHUNK] for start in range(0, whole, CHUNK)]
            self._tail = self._tail[whole:]
        self.length = len(self._full) * CHUNK + len(self._tail)

    def cut(self, length: int) -> None:
        """Keep the first `length` items, of which there are as many."""
        chunks, offset = divmod(length, CHUNK)
        if chunks < len(self._full):
            self._tail = self._full[chunks][:offset]  # a copy: others may share the chunk
            del self._full[chunks:]
        else:
            del self._tail[offset:]
        self.length = length

    def copy(self) -> Self:
        """Return a list with the same items, which shares the full chunks."""
        twin = type(self)()
        twin._full = self._full.copy()  # noqa: SLF001 - of its own class
        twin._tail = self._tail[:]  # noqa: SLF001
        twin.length = self.length
        return twin


class TokenList(SharedList[int]):
    """Token ids, in 4 bytes each. Raises OverflowError for one outside uint32."""

    __slots__ = ()

    def _empty(self) -> array[int]:
        return array("I")

    def as_array(self) -> NDArray[np.uint32]:
        """Return a copy."""
        return np.concatenate([np.frombuffer(chunk, np.uint32) for chunk in (*self._full, self._tail)])
