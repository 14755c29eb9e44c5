"""Reads a JSON object field by field: each is checked, and what nobody has asked for is refused.

null is the same as no field, as OpenAI's API has it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from service.errors import InvalidArgument

_MAX_NAME_CHARACTERS = 64


class Fields:
    """One object, and which of its fields were read."""

    def __init__(self, values: object, path: str = "") -> None:
        """`path` is where the object stands. Raises InvalidArgument if it is none."""
        if not isinstance(values, dict):
            raise bad(path, "must be an object")
        self._values: Mapping[str, Any] = values
        self._path = path
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """Where a field stands."""
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        """A field as it is; None if it is not there."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A string of whole characters."""
        value = self.take(name)
        return None if value is None else sound(value, self.path(name))

    def needed(self, name: str) -> str:
        """A string that has to be there, and say something."""
        value = self.text(name)
        if not value:
            raise bad(self.path(name), "is needed")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; False if it is not there."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise bad(self.path(name), "must be true or false")
        return bool(value)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.take(name)
        return None if value is None else number(value, self.path(name))

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number within bounds."""
        value = self.take(name)
        return None if value is None else whole(value, self.path(name), least, most)

    def items(self, name: str, most: int) -> list[Any] | None:
        """A list of up to so many values."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise bad(self.path(name), "must be a list")
        if len(value) > most:
            raise bad(self.path(name), f"has more than {most} entries")
        return value

    def end(self, ignored: Collection[str] = ()) -> None:
        """All was read. What else there is, is of no use, or ignored: raises InvalidArgument."""
        for name, value in self._values.items():
            if name in self._read or name in ignored or value is None:
                continue
            shown = name[:_MAX_NAME_CHARACTERS].encode(errors="replace").decode()
            raise InvalidArgument("UNKNOWN_FIELD", self.path(shown), f"{shown}: is not supported here")


def bad(field: str, matter: str) -> InvalidArgument:
    """A field has a value that it cannot have."""
    return InvalidArgument("BAD_FIELD", field, f"{field or 'the request'} {matter}")


def sound(value: object, field: str) -> str:
    """A string without halves of characters, which JSON can have and UTF-8 cannot."""
    if not isinstance(value, str):
        raise bad(field, "must be a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad(field, "holds half of a character") from None
    return value


def number(value: object, field: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(field, "must be a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or abs(found) > _LARGEST:
        raise bad(field, "is out of all bounds")
    return found


# Of single precision, which the API computes with.
_LARGEST = 3e38


def whole(value: object, field: str, least: int, most: int) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(field, "must be a whole number")
    if not least <= value <= most:
        raise bad(field, f"must be from {least} to {most}")
    return value
