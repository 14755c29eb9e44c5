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
        ours: Whether Quire's code is measured, so that `--against` measures another checkout beside it.
        bytes_read: What a step has to read at least; 0 where that is not the limit, or the peer says it.
        flops: What a step has to compute at least, likewise.
    """

    label: str
    peer: str
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ours: bool = True
    bytes_read: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of the tokens/s of two entries in every round, by their labels. `goal`: the least wanted."""

    ours: str
    theirs: str
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload that all entries run in turns.

    Attributes:
        unit: What a sample is the time of.
        share: How much of the run's time it gets, compared with the others.
        prepare: A method of the peers and its arguments, called before the first turn.
        warm: Arguments of a first turn, which does not count, that differ from the others'.
        turn_over_warm: At least how many times as long as that first turn the others take.
        group: A name for several rows, which are only measured when they or their group are named.
    """

    name: str
    title: str
    unit: str
    entries: Sequence[Entry]
    comparisons: Sequence[Comparison]
    warm: dict[str, Any]
    share: float = 1.0
    prepare: tuple[str, dict[str, Any]] | None = None
    turn_over_warm: float = 1.0
    group: str = ""


def select(workloads: Sequence[Workload], patterns: Sequence[str]) -> list[Workload]:
    """The workloads whose names or groups match a pattern; without patterns all without a group.

    Raises ValueError if a pattern matches none.
    """
    for pattern in patterns:
        if not any(_matches(workload, pattern) for workload in workloads):
            names = ", ".join(workload.name for workload in workloads)
            raise ValueError(f"no row is called {pattern}: there are {names}")
    if not patterns:
        return [workload for workload in workloads if not workload.group]
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
            comparisons.append(Comparison(entry.label, before.label))
    return replace(workload, entries=entries, comparisons=comparisons)
