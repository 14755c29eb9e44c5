"""Finds stop texts in a text that grows piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop texts in one text. Holds back text that may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        # The stop text that was found; `push` must not be called after that.
        self.found = ""

    def push(self, text: str) -> str:
        """Adds text; returns what can be sent of it and of the text held back before."""
        pending = self._held + text
        ends = [
            (begin + len(stop), begin, stop) for stop in self._stops if (begin := pending.find(stop)) >= 0
        ]
        if ends:
            # The one that ends first; of several the longest, which begins first.
            _, begin, self.found = min(ends)
            self._held = ""
            return pending[:begin]
        cut = max(0, len(pending) - self._longest + 1)
        while (held := pending[cut:]) and not any(stop.startswith(held) for stop in self._stops):
            cut += 1
        self._held = held
        return pending[:cut]

    def ends_in(self, ahead: str) -> bool:
        """Whether a stop text ends with the last of these characters, which may be pushed next."""
        if not (self._stops and ahead):
            return False
        text = self._held[-self._longest :] + ahead[-self._longest :]
        return text.endswith(self._stops)

    def flush(self) -> str:
        """Returns the text held back: the text has ended without a stop text."""
        held, self._held = self._held, ""
        return held
