"""A list whose copies share common items, so that a thousand forks of a long prompt are cheap.

    full  [ 1024 items | 1024 items ]   segments that never change, so copies share them
    tail  [ the rest ]                  not shared

A copy costs a reference for each segment, and the items of the tail. Items change at the end only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

SEGMENT_ITEMS = 1024

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A list of T in segments. Equal to any sequence with equal items. Owned by one writer.

    `length` is its length; reading it is faster than `len`.
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
        """Return an item, or a list of a slice's items."""
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            found: list[T] = []
            while start < end:
                segment, offset = divmod(start, SEGMENT_ITEMS)
                items = self._full[segment] if segment < len(self._full) else self._tail
                found += items[offset : offset + end - start]
                start += min(SEGMENT_ITEMS - offset, end - start)
            return found
        length = self.length
        if not -length <= index < length:
            raise IndexError(index)
        segment, offset = divmod(index % length, SEGMENT_ITEMS)
        item: T = (self._full[segment] if segment < len(self._full) else self._tail)[offset]
        return item

    def __iter__(self) -> Iterator[T]:
        for segment in self._full:
            yield from segment
        yield from self._tail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    def append(self, item: T) -> None:
        self._tail.append(item)
        self.length += 1
        if len(self._tail) == SEGMENT_ITEMS:
            self._full.append(self._tail)
            self._tail = self._empty()

    def extend(self, items: Iterable[T]) -> None:
        self._tail.extend(items)
        if len(self._tail) >= SEGMENT_ITEMS:
            whole = len(self._tail) // SEGMENT_ITEMS * SEGMENT_ITEMS
            self._full += [
                self._tail[start : start + SEGMENT_ITEMS] for start in range(0, whole, SEGMENT_ITEMS)
            ]
            self._tail = self._tail[whole:]
        self.length = len(self._full) * SEGMENT_ITEMS + len(self._tail)

    def cut(self, length: int) -> None:
        """Keep the first `length` items. `length` is at most the current one."""
        segments, offset = divmod(length, SEGMENT_ITEMS)
        if segments < len(self._full):
            self._tail = self._full[segments][:offset]  # a copy: others may share the segment
            del self._full[segments:]
        else:
            del self._tail[offset:]
        self.length = length

    def copy(self) -> Self:
        """Return a list with the same items, which shares the full segments."""
        copied = type(self)()
        copied._full = self._full.copy()  # noqa: SLF001 - of its own class
        copied._tail = self._tail[:]  # noqa: SLF001
        copied.length = self.length
        return copied


class TokenList(SharedList[int]):
    """Token ids, in 4 bytes each. Raises OverflowError for one outside uint32."""

    __slots__ = ()

    def _empty(self) -> array[int]:
        return array("I")

    def as_array(self) -> NDArray[np.uint32]:
        """Return a copy."""
        return np.concatenate([np.frombuffer(segment, np.uint32) for segment in (*self._full, self._tail)])
