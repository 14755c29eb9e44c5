"""Finds stop texts in a text that grows piece by piece.

Uses the Knuth-Morris-Pratt algorithm for each stop text, so the cost of a character does not depend on the
contents of the text and the stop texts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Stop texts, preprocessed once for all samples of an item."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.patterns = [(text, _borders(text)) for text in dict.fromkeys(texts)]

    def new_matcher(self) -> StopMatcher:
        """A matcher for a new text."""
        return StopMatcher(self)


class StopMatcher:
    """Looks for stop texts in one text. Holds back text that may be the beginning of a stop text."""

    def __init__(self, stops: StopTexts) -> None:
        self._patterns = stops.patterns
        # For each pattern the length of its longest prefix that ends the text so far.
        self._matched = [0] * len(self._patterns)
        self._held = ""
        # The stop text that was found; `push` must not be called after that.
        self.found = ""

    def push(self, text: str) -> str:
        """Adds text; returns what can be sent of it and of the text held back before."""
        if not self._patterns:
            return text
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held)):
            stop = self._step(character)
            if stop:
                self._held, self.found = "", stop
                return pending[: position + 1 - len(stop)]
        cut = len(pending) - max(self._matched)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Returns the text held back: the text has ended without a stop text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """The longest stop text that ends with this character; empty: none."""
        stop = ""
        for index, (pattern, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and pattern[matched] != character:
                matched = borders[matched - 1]
            matched += pattern[matched] == character
            if matched == len(pattern):
                stop = max(stop, pattern, key=len)
            self._matched[index] = matched
        return stop


def _borders(text: str) -> list[int]:
    """For each prefix the length of its longest border: a shorter prefix that also ends it."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
