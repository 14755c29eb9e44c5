"""Matches the patterns of an adapter's config as Python's `re` does, in bounded time.

`re` goes back and tries again, which takes exponential time for patterns such as (a+)+b. Here a match follows
the set of all positions that it can have reached. Only whether a name matches is asked, so greedy and lazy
repetitions are the same. Backreferences, lookbehind, flags and possessive repetitions are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from workers.adapters.errors import AdapterError, quoted

Ends = Callable[[str, AbstractSet[int]], AbstractSet[int]]
"""From a text and the positions where a part of a pattern may begin, the positions where it can end."""

_MAX_CHARACTERS = 4096
_MAX_DEPTH = 32
_MAX_REPEAT = 1 << 16


def _is_in_word(char: str) -> bool:
    r"""Whether \\w matches; False for ""."""
    return char.isalnum() or char == "_"


_CATEGORIES: dict[str, Callable[[str], bool]] = {"d": str.isdecimal, "w": _is_in_word, "s": str.isspace}
_ANCHORS: dict[str, Callable[[str, int], bool]] = {
    "^": lambda _, at: at == 0,
    "$": lambda text, at: at == len(text),  # Names have no newlines.
    r"\b": lambda text, at: _is_in_word(text[max(0, at - 1) : at]) is not _is_in_word(text[at : at + 1]),
}
_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]{0,9})(,?)([0-9]{0,9})\}")
_GROUP_NAME = re.compile(r"P<[A-Za-z_][A-Za-z_0-9]*>")
_PLAIN = re.compile(r"[\w.]*")  # A dot is any character.


class Steps:
    """How much work the patterns of one adapter may be: a step is one position that is looked at."""

    def __init__(self, most: int = 2_000_000) -> None:
        self._left = most

    def take(self, count: int) -> None:
        """Raises AdapterError when there is none left."""
        self._left -= count
        if self._left < 0:
            raise AdapterError("the patterns take too long to match: name the modules instead")


class Pattern:
    """A pattern for names of modules."""

    def __init__(self, text: str, steps: Steps) -> None:
        """Compile it. Raises AdapterError if it is not valid, or not supported."""
        self._text = text
        self._steps = steps
        self._ends = None if _PLAIN.fullmatch(text) else _Parser(text, steps).parse()

    def matches(self, name: str) -> bool:
        """As `re.fullmatch(pattern, name)`. Raises AdapterError if it takes too long."""
        if self._ends is None:
            return len(name) == len(self._text) and self._is_end_of(name)
        return len(name) in self._ends(name, {0})

    def matches_end(self, name: str) -> bool:
        r"""As `re.match(rf"(.*\.)?({pattern})$", name)`: all of it, or what follows a dot."""
        if self._ends is None:
            return self._is_end_of(name)
        starts = {0} | {at + 1 for at, char in enumerate(name) if char == "."}
        return len(name) in self._ends(name, starts)

    def _is_end_of(self, name: str) -> bool:
        """The same for a plain pattern. There may be one for each module, and all are tried with each."""
        self._steps.take(1)
        begin = len(name) - len(self._text)
        return (begin == 0 or (begin > 0 and name[begin - 1] == ".")) and all(
            char in (".", found) for char, found in zip(self._text, name[begin:], strict=True)
        )


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str, steps: Steps) -> None:
        self._text = text
        self._steps = steps
        self._at = 0
        self._depth = 0

    def parse(self) -> Ends:
        if len(self._text) > _MAX_CHARACTERS:
            raise AdapterError(
                f"a pattern has more than {_MAX_CHARACTERS} characters: name the modules instead"
            )
        self._steps.take(len(self._text))
        ends = self._choice()
        if self._at < len(self._text):
            raise self._error("has an unopened )")
        return ends

    def _error(self, fault: str) -> AdapterError:
        return AdapterError(f"the pattern {quoted(self._text)} {fault}: name the modules instead")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._next()
        if not char:
            raise self._error("ends too early")
        self._at += 1
        return char

    def _skip(self, expected: str) -> bool:
        found = self._text.startswith(expected, self._at)
        self._at += len(expected) * found
        return found

    def _choice(self) -> Ends:
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda text, starts: frozenset().union(*(branch(text, starts) for branch in branches))

    def _sequence(self) -> Ends:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated())

        def ends(text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
            self._steps.take(1)
            for part in parts:
                if not starts:
                    break
                starts = part(text, starts)
            return starts

        return ends

    def _repeated(self) -> Ends:
        at = self._at
        part = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return part
        if self._text.startswith(tuple(_ANCHORS), at):
            raise self._error("repeats an anchor")
        self._skip("?")
        if self._next() == "+" or self._quantifier() is not None:
            raise self._error("repeats a repetition")
        return self._repeat(part, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        """The least and the largest number of repetitions, None for any; None if there is no quantifier."""
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None or found[0] == "{}":
            return None
        self._at = found.end()
        if found[0] in "*+?":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        least = int(found[1] or 0)
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise self._error(f"must not have {found[0]}")
        return least, most

    def _repeat(self, part: Ends, least: int, most: int | None) -> Ends:
        def ends(text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
            for _ in range(least):
                starts = part(text, starts)
            found, count = set(starts), least
            while starts and (most is None or count < most):
                starts = part(text, starts) - found
                found |= starts
                count += 1
            return found

        return ends

    def _atom(self) -> Ends:
        if self._quantifier() is not None:
            raise self._error("repeats nothing")
        for anchor, holds in _ANCHORS.items():
            if self._skip(anchor):
                return lambda text, starts: {at for at in starts if holds(text, at)}
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._one(self._set())
        if char == ".":
            return self._one(lambda found: found != "\n")
        return self._one(self._class(self._take()) if char == "\\" else char.__eq__)

    def _group(self) -> Ends:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("is nested too deeply")
        ahead = next((kind for kind in ("?=", "?!") if self._skip(kind)), None)
        if ahead is None and not self._skip("?:") and self._skip("?"):
            name = _GROUP_NAME.match(self._text, self._at)
            if name is None:
                raise self._error("has a group of a kind that is not supported")
            self._at = name.end()
        inner = self._choice()
        if not self._skip(")"):
            raise self._error("has an unclosed (")
        self._depth -= 1
        if ahead is None:
            return inner
        wanted = ahead == "?="
        return lambda text, starts: {at for at in starts if bool(inner(text, {at})) is wanted}

    def _class(self, char: str) -> Callable[[str], bool]:
        """The test for an escaped character."""
        category = _CATEGORIES.get(char.lower())
        if category is not None:
            return category if char.islower() else lambda found: not category(found)
        if char.isascii() and char.isalnum():
            raise self._error(f"has \\{char}, which is not supported")
        return char.__eq__

    def _set(self) -> Callable[[str], bool]:
        negated = self._skip("^")
        tests: list[Callable[[str], bool]] = []
        while not tests or self._next() != "]":
            low = self._set_item()
            has_range = self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]")
            tests.append(self._range(low) if has_range else self._class(low[1:]) if low[1:] else low.__eq__)
        self._at += 1
        return lambda found: any(test(found) for test in tests) is not negated

    def _set_item(self) -> str:
        """A character, or an escape."""
        char = self._take()
        return char + self._take() if char == "\\" else char

    def _range(self, low: str) -> Callable[[str], bool]:
        self._at += 1
        high = self._set_item()
        # An escape of punctuation is a character.
        first, last = low[-1], high[-1]
        is_class = any(len(item) == 2 and item[1].isalnum() for item in (low, high))
        if is_class or first > last:
            raise self._error(f"must not have the range {low}-{high}")
        return lambda found: first <= found <= last

    def _one(self, test: Callable[[str], bool]) -> Ends:
        """The next character passes a test."""

        def ends(text: str, starts: AbstractSet[int]) -> AbstractSet[int]:
            self._steps.take(1 + len(starts))
            return {at + 1 for at in starts if at < len(text) and test(text[at])}

        return ends
