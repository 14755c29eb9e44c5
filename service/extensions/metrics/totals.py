"""Sums of counts that begin at 0 again, such as those of a worker with each of its starts. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping


class Totals:
    """Sums that never become smaller, by a label and a name.

    A source is what counts from 0, once. When it is gone, its last counts stay in the sum.
    """

    def __init__(self) -> None:
        self._gone: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._last: dict[Hashable, tuple[str, Counter[str]]] = {}

    def update(self, sources: Mapping[Hashable, tuple[str, Mapping[str, int]]]) -> None:
        """Takes the counts of all current sources, with the label that each belongs to."""
        for source, (label, counts) in sources.items():
            # An older snapshot of a worker can arrive after a newer one.
            _, last = self._last.get(source, (label, Counter[str]()))
            self._last[source] = label, last | Counter(counts)
        for source in self._last.keys() - sources.keys():
            label, last = self._last.pop(source)
            self._gone[label] += last

    def by_label(self) -> dict[str, Counter[str]]:
        """The sums."""
        sums = {label: counts.copy() for label, counts in self._gone.items()}
        for label, counts in self._last.values():
            sums.setdefault(label, Counter()).update(counts)
        return sums
