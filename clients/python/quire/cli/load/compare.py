"""`quire load --compare`: the differences between the figures of two files, and which are noise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quire.cli.load.summary import LATENCIES, RATES, number, pace_words, plain_console, table_of
from quire.cli.terminal import WrongUsage, escaped
from rich.table import Table
from rich.text import Text

# The format of a file of results.
FORMAT = "quire-load-1"
Verdict = Literal["better", "worse", "noise", "unknown"]
_STYLES = {"better": "green", "worse": "red", "noise": "dim", "unknown": "dim"}
# Settings that must be equal for a fair comparison.
_COMPARABLE = (
    "model", "device", "dtype", "mode", "batch", "prompt_tokens", "output_tokens",
    "shared_prefix_tokens", "shared_prefixes", "warm_up_s", "duration_s", "seed",
)  # fmt: skip
_QUANTILES = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files. `ratio` is B / A; `low` and `high` are its bounds, if both have bounds."""

    name: str
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    more_is_better: bool

    @property
    def verdict(self) -> Verdict:
        """Noise if the bounds of the ratio include 1."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 1 <= self.high:
            return "noise"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


def change(
    name: str, before: dict[str, Any], after: dict[str, Any], *, more_is_better: bool
) -> Change | None:
    """The change of a figure, or None if one of the two is not above 0.

    The errors of the two figures are independent, so the bounds of the ratio are the root of the sum of the
    squares of their distances to their bounds, as logarithms.
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
    """The changes of all comparable figures of a run."""
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
    """The differences between the settings of the two files."""
    return [
        f"{name}: {before.get(name)} and {after.get(name)}"
        for name in _COMPARABLE
        if before.get(name) != after.get(name)
    ]


def read_results(path: Path) -> dict[str, Any]:
    """Reads a file that `--out` wrote. Raises OSError and WrongUsage."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WrongUsage(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise WrongUsage(f"{path}: not a result of quire load")
    return found


def pairs(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of runs with the same pace. If both files have a single run, these two."""
    if len(before["runs"]) == len(after["runs"]) == 1:
        return [(before["runs"][0], after["runs"][0])]
    return [(a, b) for a in before["runs"] for b in after["runs"] if a["pace"] == b["pace"]]


def print_comparison(first: Path, second: Path) -> None:
    """Prints the comparison of two files. Raises OSError and WrongUsage."""
    before, after = read_results(first), read_results(second)
    console = plain_console()
    for text in differences(before["about"], after["about"]):
        console.print(Text(escaped(f"They differ in {text}."), "yellow"))
    matched = pairs(before, after)
    if not matched:
        raise WrongUsage("the two files have no pace in common")
    for a, b in matched:
        console.print(Text(_paces(a, b), "bold"))
        console.print(_table(changes(a, b)))
        for path, run in ((first, a), (second, b)):
            for remark in run["remarks"]:
                if remark["who"] == "client":
                    console.print(Text(escaped(f"{path}: {remark['text']}"), "bold red"))
        console.print()
    note = (
        "Ratios are B / A, with 95% bounds from the noise within the runs. Noise: the bounds include 1. "
        "The bounds do not include variation between runs, such as other work on the machine: "
        "alternate several runs of A and B before you rely on a small difference."
    )
    console.print(Text(note, "dim"))


def _paces(a: dict[str, Any], b: dict[str, Any]) -> str:
    words = [pace_words(run["pace"]) for run in (a, b)]
    return words[0] if words[0] == words[1] else f"A: {words[0]}; B: {words[1]}"


def _table(found: list[Change]) -> Table:
    table = table_of("", "A", "B", "B / A", "bounds", "")
    for one in found:
        bounds = "" if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}"
        verdict = Text(one.verdict, _STYLES[one.verdict])
        cells = (one.name, number(one.before), number(one.after), f"{one.ratio:.2f}", bounds)
        table.add_row(*cells, verdict)
    return table
