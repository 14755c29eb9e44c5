"""The parts of a run: workloads, their entries and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One competitor in one workload, measured by one call of its peer.

    Attributes:
        parts: What a call measures, if that is more than one thing; each is a figure of its own.
        ours: Whether Quire's code is measured, so that `--against` measures another checkout beside it.
        bytes_read: What a step has to read at least; 0 where that is not the limit, or the peer says it.
        flops: What a step has to compute at least, likewise.
    """

    label: str
    peer: str
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    parts: Sequence[str] = ()
    ours: bool = True
    bytes_read: int = 0
    flops: int = 0

    def labels(self) -> dict[str, str]:
        """The label of each part. The key of a single part is the empty string."""
        return {part: f"{self.label}: {part}" for part in self.parts} or {"": self.label}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of two figures, by their labels, in every round.

    Of tokens/s, or, with `percentile`, of that percentile of the times. `goal`: the least it should be.
    """

    ours: str
    theirs: str
    goal: float | None = None
    percentile: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload that all entries run in turns.

    Attributes:
        unit: What a sample is the time of.
        share: How much of the run's time it gets, compared with the others.
        prepare: A method of the peers and its arguments, called before the first turn.
        warm: Arguments of a first turn, which does not count, that differ from the others'; or None.
        turn_over_warm: At least how many times as long as that first turn the others take.
        rounds: The least and the most.
        optional: Only measured when it or its group is named.
        group: A name for several rows.
    """

    name: str
    title: str
    unit: str
    entries: Sequence[Entry]
    comparisons: Sequence[Comparison] = ()
    share: float = 1.0
    prepare: tuple[str, dict[str, Any]] | None = None
    warm: dict[str, Any] | None = None
    turn_over_warm: float = 1.0
    rounds: tuple[int, int] = (3, 20)
    optional: bool = False
    group: str = ""

    def labels(self) -> list[str]:
        """The labels of all figures."""
        return [label for entry in self.entries for label in entry.labels().values()]


def select(workloads: Sequence[Workload], patterns: Sequence[str]) -> list[Workload]:
    """The workloads whose names or groups match a pattern; without patterns all except the optional ones.

    Raises ValueError if a pattern matches none.
    """
    for pattern in patterns:
        if not any(_matches(workload, pattern) for workload in workloads):
            names = ", ".join(workload.name for workload in workloads)
            raise ValueError(f"no row is called {pattern}: there are {names}")
    if not patterns:
        return [workload for workload in workloads if not workload.optional]
    return [w for w in workloads if any(_matches(w, pattern) for pattern in patterns)]


def _matches(workload: Workload, pattern: str) -> bool:
    return workload.group == pattern or fnmatchcase(workload.name, pattern)


def before_and_after(workload: Workload) -> Workload:
    """Only Quire's entries, each with that of the other checkout, whose peers are named PEER@before."""
    entries: list[Entry] = []
    comparisons: list[Comparison] = []
    for entry in workload.entries:
        if entry.ours:
            before = replace(entry, label=f"before: {entry.label}", peer=f"{entry.peer}@before")
            entries += [before, entry]
            for part, label in entry.labels().items():
                percentile = 50 if part else None
                comparisons.append(Comparison(label, before.labels()[part], percentile=percentile))
    return replace(workload, entries=entries, comparisons=comparisons)
