"""`quire load --compare`: how figures of one file differ from those of another, and what of it is noise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from service.cli.load.summary import LATENCIES, RATES, number, pace_words, plain_console
from service.printable import escaped

# Names the form of a file of results.
FORMAT = "quire-load-1"
Verdict = Literal["better", "worse", "noise", "unknown"]
_STYLES = {"better": "green", "worse": "red", "noise": "dim", "unknown": "dim"}
# What makes two files answers to different questions.
_SAME = (
    "model", "device", "dtype", "mode", "batch", "prompt_tokens", "output_tokens",
    "shared_prefix_tokens", "shared_prefixes", "warm_up_s", "duration_s", "seed",
)  # fmt: skip
_QUANTILES = ("mean", "p50", "p90", "p99")


class BadResults(Exception):
    """A file that does not hold results of `quire load`; the message names it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files. `ratio` is B / A, with the bounds `low` and `high` where both have some."""

    name: str
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    more_is_better: bool

    @property
    def verdict(self) -> Verdict:
        """Noise: the bounds of the ratio include 1."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 1 <= self.high:
            return "noise"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


def change(
    name: str, before: dict[str, Any], after: dict[str, Any], *, more_is_better: bool
) -> Change | None:
    """How a figure changed; None where one of the two is not above 0.

    The bounds of the ratio: the logarithms of the two figures differ independently of each other, so their
    distances to their bounds add up as the sides of a right triangle do.
    """
    a, b = before.get("value"), after.get("value")
    if not a or not b or a < 0 or b < 0:
        return None
    low = high = None
    if all(figure.get(bound, 0) > 0 for figure in (before, after) for bound in ("low", "high")):
        down = math.hypot(math.log(after["value"] / after["low"]), math.log(before["high"] / before["value"]))
        up = math.hypot(math.log(after["high"] / after["value"]), math.log(before["value"] / before["low"]))
        low, high = b / a * math.exp(-down), b / a * math.exp(up)
    return Change(name, a, b, b / a, low, high, more_is_better)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """All figures of a run that can be compared."""
    found = []
    for name, label in RATES.items():
        found.append(
            change(label, before["throughput"][name], after["throughput"][name], more_is_better=True)
        )
    if before["goodput"] and after["goodput"]:
        pair = (run["goodput"]["good_requests_per_s"] for run in (before, after))
        found.append(change("good requests/s", *pair, more_is_better=True))
    for name, label in LATENCIES.items():
        for quantile in _QUANTILES:
            pair = (run[name].get(quantile, {}) for run in (before, after))
            found.append(change(f"{label} {quantile}, ms", *pair, more_is_better=False))
    return [one for one in found if one is not None]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In what the two files were made differently, beside the server."""
    return [
        f"{name}: {before.get(name)} and {after.get(name)}"
        for name in _SAME
        if before.get(name) != after.get(name)
    ]


def read_results(path: Path) -> dict[str, Any]:
    """What `--out` wrote. Raises OSError and BadResults."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadResults(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BadResults(f"{path}: not a result of quire load")
    return found


def pairs(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of the same pace; of two files with one run each, these."""
    if len(before["runs"]) == len(after["runs"]) == 1:
        return [(before["runs"][0], after["runs"][0])]
    return [(a, b) for a in before["runs"] for b in after["runs"] if a["pace"] == b["pace"]]


def print_comparison(first: Path, second: Path) -> None:
    """Prints it. Raises OSError and BadResults."""
    before, after = read_results(first), read_results(second)
    console = plain_console()
    for text in differences(before["about"], after["about"]):
        console.print(Text(escaped(f"They differ in {text}."), "yellow"))
    matched = pairs(before, after)
    if not matched:
        raise BadResults("the two files have no pace in common")
    for a, b in matched:
        console.print(Text(_paces(a, b), "bold"))
        console.print(_table(changes(a, b)))
        for path, run in ((first, a), (second, b)):
            for remark in run["remarks"]:
                if remark["who"] == "client":
                    console.print(Text(escaped(f"{path}: {remark['text']}"), "bold red"))
        console.print()
    note = (
        "Ratios are B / A, with the bounds between which 95 of 100 of them would lie by the noise in a run. "
        "Noise: the bounds include 1. One run each says nothing of what differs from run to run, such as "
        "other work on the machine: run A and B again, in turns, before believing a small difference."
    )
    console.print(Text(note, "dim"))


def _paces(a: dict[str, Any], b: dict[str, Any]) -> str:
    words = [pace_words(run["pace"]) for run in (a, b)]
    return words[0] if words[0] == words[1] else f"A: {words[0]}; B: {words[1]}"


def _table(found: list[Change]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(("", "A", "B", "B / A", "bounds", "")):
        table.add_column(name, justify="right" if 0 < i < 5 else "left", no_wrap=True)
    for one in found:
        bounds = "" if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}"
        verdict = Text(one.verdict, _STYLES[one.verdict])
        cells = (one.name, number(one.before), number(one.after), f"{one.ratio:.2f}", bounds)
        table.add_row(*cells, verdict)
    return table
