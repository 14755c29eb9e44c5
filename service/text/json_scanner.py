"""Follows an object in JSON, character by character, in memory that only its levels take."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_LEVELS = 64
_SPACES = frozenset(" \t\r\n")
# Longer numbers are refused: Python's own parser does not take all of them.
_MAX_SCALAR_CHARACTERS = 400
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_AFTER_SCALAR = _SPACES | frozenset(",]}")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class MalformedJson(Exception):
    """No further characters can make it an object in JSON of at most `MAX_LEVELS`."""


class JsonScanner:
    """Whether the characters so far are the beginning of an object, or all of it."""

    def __init__(self) -> None:
        # The brackets that are open, and what may come next: one of the methods below.
        self._levels: list[str] = []
        self._next: Callable[[str], None] = self._at_begin
        # Of a string: whether it is a key, and what is left of an escape.
        self._is_key = False
        self._hex_left = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._levels)

    @property
    def is_complete(self) -> bool:
        """Whether the object has ended."""
        return self._next == self._at_end

    def feed(self, char: str) -> None:
        """Takes the next character. Raises MalformedJson."""
        self._next(char)

    def _at_begin(self, char: str) -> None:
        if char in _SPACES:
            return
        if char != "{":
            raise MalformedJson
        self._open(char)

    def _at_end(self, _char: str) -> None:
        raise MalformedJson

    def _open(self, char: str) -> None:
        if len(self._levels) >= MAX_LEVELS:
            raise MalformedJson
        self._levels.append(char)
        self._next = self._at_first_key if char == "{" else self._at_first_value

    def _close(self, char: str) -> None:
        if self._levels.pop() + char not in ("{}", "[]"):
            raise MalformedJson
        self._next = self._after_value if self._levels else self._at_end

    def _at_first_key(self, char: str) -> None:
        if char == "}":
            self._close(char)
        else:
            self._at_key(char)

    def _at_key(self, char: str) -> None:
        if char in _SPACES:
            return
        if char != '"':
            raise MalformedJson
        self._is_key, self._next = True, self._in_string

    def _at_colon(self, char: str) -> None:
        if char in _SPACES:
            return
        if char != ":":
            raise MalformedJson
        self._next = self._at_value

    def _at_first_value(self, char: str) -> None:
        if char == "]":
            self._close(char)
        else:
            self._at_value(char)

    def _at_value(self, char: str) -> None:
        if char in _SPACES:
            return
        if char == '"':
            self._is_key, self._next = False, self._in_string
        elif char in "{[":
            self._open(char)
        elif char.isalnum() or char == "-":
            self._scalar, self._next = char, self._in_scalar
        else:
            raise MalformedJson

    def _after_value(self, char: str) -> None:
        if char in _SPACES:
            return
        if char == ",":
            self._next = self._at_key if self._levels[-1] == "{" else self._at_value
        elif char in "]}":
            self._close(char)
        else:
            raise MalformedJson

    def _in_string(self, char: str) -> None:
        if char == '"':
            self._next = self._at_colon if self._is_key else self._after_value
        elif char == "\\":
            self._next = self._in_escape
        elif char < " ":
            raise MalformedJson

    def _in_escape(self, char: str) -> None:
        if char == "u":
            self._hex_left, self._next = 4, self._in_hex
        elif char in _ESCAPES:
            self._next = self._in_string
        else:
            raise MalformedJson

    def _in_hex(self, char: str) -> None:
        if char not in _HEX:
            raise MalformedJson
        self._hex_left -= 1
        if not self._hex_left:
            self._next = self._in_string

    def _in_scalar(self, char: str) -> None:
        if char not in _AFTER_SCALAR:
            self._scalar += char
            if len(self._scalar) > _MAX_SCALAR_CHARACTERS:
                raise MalformedJson
            return
        if _SCALAR.fullmatch(self._scalar) is None:
            raise MalformedJson
        self._next = self._after_value
        self._after_value(char)
