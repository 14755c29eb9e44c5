"""Finds the texts that end a sample, while it is written piece by piece.

Each stop text is looked for by the Knuth-Morris-Pratt algorithm, so a character costs the same however the
text and the stop texts are made.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Stop texts, prepared once for all samples of an item."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.patterns = [(text, _borders(text)) for text in dict.fromkeys(texts)]

    def watch(self) -> StopWatch:
        """Looks for them in a new text."""
        return StopWatch(self)


class StopWatch:
    """One text. What may be the beginning of a stop text is held back until that is decided."""

    def __init__(self, stops: StopTexts) -> None:
        self._patterns = stops.patterns
        # Of each pattern, so many characters are the end of the text so far.
        self._matched = [0] * len(self._patterns)
        self._held = ""
        # The stop text that was found; nothing may be pushed after that.
        self.found = ""

    def push(self, text: str) -> str:
        """More text came; returns what can be shown of it and of what was held back."""
        if not self._patterns:
            return text
        pending = self._held + text
        for place, character in enumerate(text, start=len(self._held)):
            ended = self._step(character)
            if ended:
                self._held, self.found = "", ended
                return pending[: place + 1 - len(ended)]
        cut = len(pending) - max(self._matched)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """No more text comes: what is held back is no stop text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """The longest stop text that ends with this character, if one does."""
        ended = ""
        for index, (pattern, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and pattern[matched] != character:
                matched = borders[matched - 1]
            matched += pattern[matched] == character
            if matched == len(pattern):
                ended = max(ended, pattern, key=len)
            self._matched[index] = matched
        return ended


def _borders(text: str) -> list[int]:
    """For each prefix the length of the longest shorter prefix that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
