"""Reads a JSON object field by field: each field is checked, and unknown fields are refused.

A null field counts as absent, as in OpenAI's API. pydantic was tried: 432 lines instead of 456, but it
blocks the event loop for three times as long. null, unpaired surrogates, and stopping at the first of a
hundred thousand errors need validators in Python around it. msgspec is fast, but it lets unpaired surrogates
pass, refuses unknown fields that are null, has no bounds above 2**63, and names no keys in its errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from service.errors import InvalidArgument

_MAX_NAME_CHARACTERS = 64
# About the largest float32, the type of the protos' fields.
_MAX_NUMBER = 3e38
_Value = TypeVar("_Value")


class Fields:
    """A JSON object, and the names of the fields that were read."""

    def __init__(self, values: object, path: str = "") -> None:
        """`path`: the object's path in the request. Raises InvalidArgument if `values` is not an object."""
        if not isinstance(values, dict):
            raise bad_field(path, "must be an object")
        self._values: Mapping[str, Any] = values
        self._path = path
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The unchecked value of a field. None: absent."""
        self._read.add(name)
        return self._values.get(name)

    def get(self, name: str, check: Callable[..., _Value], *bounds: int) -> _Value | None:
        """The value of a field, checked by one of the functions below. None: absent."""
        value = self.raw(name)
        return None if value is None else check(value, self.path(name), *bounds)

    def required(self, name: str) -> str:
        """The value of a string field that must be present and not empty."""
        value = self.get(name, string)
        if not value:
            raise bad_field(self.path(name), "is required")
        return value

    def refuse_others(
        self, ignored: Collection[str] = (), neutral: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """Raises InvalidArgument for the first field that was not read and is not `ignored`.

        `neutral`: by name, the values of unsupported fields that have no effect, such as their defaults.
        """
        for name, value in self._values.items():
            if name in self._read or name in ignored or value is None:
                continue
            if name in neutral and _is_same(value, neutral[name]):
                continue
            shown = name[:_MAX_NAME_CHARACTERS].encode(errors="replace").decode()
            raise InvalidArgument("UNKNOWN_FIELD", self.path(shown), f"{shown} is not supported")


def _is_same(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def bad_field(field: str, problem: str) -> InvalidArgument:
    """The error for an invalid value of a field."""
    return InvalidArgument("BAD_FIELD", field, f"{field or 'the request'} {problem}")


def unsupported(field: str, why: str) -> InvalidArgument:
    """The error for a valid field that should change the result and is not supported."""
    return InvalidArgument("UNSUPPORTED_FIELD", field, f"{field}: {why}")


def string(value: object, field: str) -> str:
    """A string without unpaired surrogates, which JSON allows and UTF-8 does not."""
    if not isinstance(value, str):
        raise bad_field(field, "must be a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise bad_field(field, "has an unpaired surrogate") from None
    return value


def boolean(value: object, field: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise bad_field(field, "must be true or false")
    return value


def number(value: object, field: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(field, "must be a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or abs(result) > _MAX_NUMBER:
        raise bad_field(field, "is too large")
    return result


def integer(value: object, field: str, minimum: int, maximum: int) -> int:
    """An integer from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_field(field, "must be an integer")
    if not minimum <= value <= maximum:
        raise bad_field(field, f"must be from {minimum} to {maximum}")
    return value


def strings(value: object, field: str, max_entries: int) -> list[str]:
    """A list of at most `max_entries` strings."""
    return [string(one, f"{field}[{index}]") for index, one in enumerate(array(value, field, max_entries))]


def array(value: object, field: str, max_entries: int) -> list[Any]:
    """A list of at most `max_entries`."""
    if not isinstance(value, list):
        raise bad_field(field, "must be a list")
    if len(value) > max_entries:
        raise bad_field(field, f"has more than {max_entries} entries")
    return value
