"""Reads an answer character by character, and can go back: the input of `output_parser`.

Its methods are generators, which get the next character by `send`, so that a text may come in any pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Iterable

from service.text.call_values import NoCall
from service.text.json_scanner import MAX_LEVELS, JsonScanner, MalformedJson
from service.text.output_formats import Pattern

MAX_ARGUMENT_CHARACTERS = 1 << 20
# The most characters of an object that are held back until it is known whether it is a call.
MAX_HELD_CHARACTERS = 1 << 16
# The patterns of all formats, made once.
_pattern = functools.cache(Pattern)


class BrokenCall(Exception):
    """The call that has begun is malformed, or too long."""


class AnswerReader:
    """The characters of one answer.

    Attributes:
        consumed: What was read since the caller last cleared it: `unread` can only go back so far.
        has_ended: Set by the caller when there are no more characters.
    """

    def __init__(self) -> None:
        self.consumed: list[str] = []
        self.has_ended = False
        # What is read again, from an index on, before further characters.
        self._ahead, self._ahead_from = "", 0

    @property
    def is_behind(self) -> bool:
        """Whether characters are left that are read again."""
        return self._ahead_from < len(self._ahead)

    def read(self) -> Generator[None, str, str]:
        """The next character; empty: the answer has ended."""
        if self._ahead_from < len(self._ahead):
            char = self._ahead[self._ahead_from]
            self._ahead_from += 1
        elif self.has_ended:
            return ""
        else:
            self._ahead, self._ahead_from = "", 0
            # The last `next` sends nothing.
            char = (yield) or ""
        if char:
            self.consumed.append(char)
        return char

    def unread(self, num_characters: int) -> None:
        """Goes back: the last characters are read again next."""
        if num_characters <= self._ahead_from:
            # They are still there.
            self._ahead_from -= num_characters
        else:
            again = "".join(self.consumed[-num_characters:])
            self._ahead, self._ahead_from = again + self._ahead[self._ahead_from :], 0
        del self.consumed[len(self.consumed) - num_characters :]

    def read_ahead(self, stop: re.Pattern[str]) -> str:
        """Takes all characters up to a match of `stop` from those that are read again."""
        found = stop.search(self._ahead, self._ahead_from)
        end = len(self._ahead) if found is None else found.start()
        text, self._ahead_from = self._ahead[self._ahead_from : end], end
        return text

    def match(self, *texts: str) -> Generator[None, str, dict[str, str] | None]:
        """Reads the longest of the texts of a pattern. None: it is none of them, and nothing is read."""
        pattern = _pattern(*texts)
        text, found, matched = "", pattern.match(""), 0
        while pattern.may_begin_with(text):
            char = yield from self.read()
            if not char:
                break
            text += char
            if (match := pattern.match(text)) is not None:
                found, matched = match, len(text)
        self.unread(len(text) - matched)
        return found

    def expect(self, *texts: str) -> Generator[None, str, dict[str, str]]:
        """As `match`. Raises NoCall if it is none of the texts."""
        found = yield from self.match(*texts)
        if found is None:
            raise NoCall
        return found

    def until(self, end: str) -> Generator[None, str, str]:
        """Reads up to a literal, which is dropped. Raises BrokenCall if it does not come."""
        text = ""
        while not text.endswith(end):
            char = yield from self.read()
            if not char or len(text) > MAX_ARGUMENT_CHARACTERS:
                raise BrokenCall
            text += char
        return text.removesuffix(end)

    def read_json(self, scanner: JsonScanner) -> Generator[None, str, str]:
        """The next character, which the scanner gets; empty: the answer has ended, or is not JSON."""
        char = yield from self.read()
        if char:
            try:
                scanner.feed(char)
            except MalformedJson:
                self.unread(1)
                return ""
        return char

    def bracketed(self, marks: Iterable[str], escape: str = "") -> Generator[None, str, str]:
        """Reads up to the bracket that closes the first one. Not those between two marks. Raises NoCall."""
        text, depth, mark, is_escaped = "", 0, "", False
        while not text or depth:
            char = yield from self.read()
            if not char or len(text) >= MAX_HELD_CHARACTERS:
                raise NoCall
            text += char
            if is_escaped:
                is_escaped = False
            elif mark:
                is_escaped = char == escape
                mark = "" if text.endswith(mark) else mark
            elif not (mark := next(filter(text.endswith, marks), "")):
                depth += (char in "[({") - (char in "])}")
                if not 0 <= depth <= MAX_LEVELS:
                    raise NoCall
        return text
