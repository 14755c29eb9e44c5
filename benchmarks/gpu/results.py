"""What a run found, as it is written to JSON."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from benchmarks.gpu.timing import Spread

# No number: `benchmarks.readme` looks for those among the committed results.
FORMAT = "gpu-bench 1"


class Roof(TypedDict):
    """What the device can do at most, measured in the same run."""

    bytes_per_s: float
    flops_per_s: float


class Goal(TypedDict):
    """A bound of the design on one of a row's figures."""

    figure: str
    bound: float
    at_least: bool
    reached: bool


class Row(TypedDict):
    """One figure. `figures` are numbers by name; names that begin with `share_` are parts of 1."""

    name: str
    ms: Spread
    figures: dict[str, float]
    goals: NotRequired[list[Goal]]


class Part(TypedDict):
    """Rows measured together. `problem` says why there are none, or no more."""

    name: str
    seconds: float
    rows: list[Row]
    notes: list[str]
    problem: NotRequired[str]


class Result(TypedDict):
    """One run."""

    format: str
    date: str
    command: str
    rehearsal: bool
    seconds: float
    machine: dict[str, Any]
    roof: Roof | None
    parts: list[Part]


def row(name: str, ms: Spread, *goals: tuple[str, float, bool], **figures: float) -> Row:
    """A row; each goal is (figure, bound, whether the figure has to be at least that)."""
    found = Row(name=name, ms=ms, figures=figures)
    if goals:
        found["goals"] = [
            Goal(
                figure=figure,
                bound=bound,
                at_least=at_least,
                reached=figures[figure] >= bound if at_least else figures[figure] <= bound,
            )
            for figure, bound, at_least in goals
        ]
    return found
