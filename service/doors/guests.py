"""How many connections there are, and which are too many.

Pure: is told what there is, once in a while, and says whom to hang up on. The newest go first: whoever opens
many does not push out those who were here before.
"""

from __future__ import annotations

from collections.abc import Sequence


class Guests:
    """Owner of the connections' order, by numbers that no two have at once."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # As they came, as far as one look tells: numbers grow, within a look about as connections are made.
        self._here: dict[int, None] = {}
        # Hung up on, and not gone yet.
        self._leaving: set[int] = set()

    @property
    def count(self) -> int:
        """How many there were at the last look."""
        return len(self._here)

    def seen(self, connections: Sequence[int]) -> list[int]:
        """These are all there are now. Returns those to hang up on, each once."""
        there = set(connections)
        self._leaving &= there
        self._here = {number: None for number in self._here if number in there}
        self._here.update(dict.fromkeys(sorted(there - self._here.keys() - self._leaving)))
        too_many = list(self._here)[self._max_connections :]
        for number in too_many:
            del self._here[number]
        self._leaving.update(too_many)
        return too_many
