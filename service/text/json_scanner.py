"""Follows an object in JSON, character by character, in memory that only its levels take."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_LEVELS = 64
_SPACES = frozenset(" \t\r\n")
# Longer numbers are refused: Python's own parser does not take all of them.
_MAX_SCALAR_CHARACTERS = 400
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_AFTER_SCALAR = _SPACES | frozenset(",]}")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_VALUE = {'"': "in text", "{": "first key", "[": "first value"}
_VALUES = ("first value", "value")
# By what is expected, what is expected after each character that may come, beside spaces, and the beginnings
# of numbers and names.
_NEXT: Mapping[str, Mapping[str, str]] = {
    "object": {"{": "first key"},
    "first key": {'"': "in key", "}": "close"},
    "key": {'"': "in key"},
    "colon": {":": "value"},
    "first value": {**_VALUE, "]": "close"},
    "value": _VALUE,
    "after value in {": {",": "key", "}": "close"},
    "after value in [": {",": "value", "]": "close"},
}


class MalformedJson(Exception):
    """No further characters can make it an object in JSON of at most `MAX_LEVELS`."""


class JsonScanner:
    """Whether the characters so far are the beginning of an object, or all of it."""

    def __init__(self) -> None:
        # The brackets that are open, and what is expected.
        self._levels: list[str] = []
        self._expected = "object"
        # In a string: whether an escape has begun, and how many digits a numeric one still needs.
        self._is_escape = False
        self._hex_left = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._levels)

    @property
    def is_complete(self) -> bool:
        """Whether the object has ended."""
        return self._expected == "nothing"

    def feed(self, char: str) -> None:
        """Takes the next character. Raises MalformedJson."""
        if self._expected in ("in key", "in text"):
            self._feed_string(char)
        elif self._expected == "in scalar" and char not in _AFTER_SCALAR:
            self._scalar += char
            if len(self._scalar) > _MAX_SCALAR_CHARACTERS:
                raise MalformedJson
        else:
            if self._expected == "in scalar":
                if _SCALAR.fullmatch(self._scalar) is None:
                    raise MalformedJson
                self._end_value()
            if char not in _SPACES or self.is_complete:
                self._feed_mark(char)

    def _feed_mark(self, char: str) -> None:
        """Takes a character outside of strings, numbers and names, or the first one of these."""
        expected = _NEXT.get(self._expected, {}).get(char)
        if expected is None and self._expected in _VALUES and (char.isalnum() or char == "-"):
            self._scalar, expected = char, "in scalar"
        if expected is None or (len(self._levels) >= MAX_LEVELS and char in "{["):
            raise MalformedJson
        self._expected = expected
        if char in "{[":
            self._levels.append(char)
        elif expected == "close":
            self._levels.pop()
            self._end_value()

    def _feed_string(self, char: str) -> None:
        if self._hex_left:
            if char not in _HEX:
                raise MalformedJson
            self._hex_left -= 1
        elif self._is_escape:
            if char not in _ESCAPES:
                raise MalformedJson
            self._is_escape, self._hex_left = False, 4 if char == "u" else 0
        elif char < " ":
            raise MalformedJson
        elif char != '"':
            self._is_escape = char == "\\"
        elif self._expected == "in key":
            self._expected = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._expected = f"after value in {self._levels[-1]}" if self._levels else "nothing"
