"""What a run on a GPU has found: rows in one JSON and one table, written anew after each row."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "gpu 1"
NAME = "gpu"
# Of these a row is no failure.
_FINE = ("ok", "skipped", "missing")
# Figures that are shares or ratios are printed as percentages.
_SHARES = "of "


@dataclass(slots=True)
class Row:
    """One thing that was tried.

    Attributes:
        state: "ok", "failed", "timed out", "crashed", "skipped" (no time was left), or "missing" (a package).
        seconds: How long it took, with compiling and loading.
        figures: Numbers by their names. Those that begin with "of" are shares: of what the device itself read
            or multiplied in this run, or of another row.
        note: Why it failed, or what is missing.
    """

    section: str
    name: str
    state: str = "ok"
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Report:
    """Owner of the two files."""

    def __init__(self, out: Path, command: str) -> None:
        """Makes the directory `out`, for gpu.json and gpu.md."""
        out.mkdir(parents=True, exist_ok=True)
        self._json, self._table = out / f"{NAME}.json", out / f"{NAME}.md"
        self._began_s = time.monotonic()
        self._command, self._date = command, dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self.machine: dict[str, Any] = {}
        self.rows: list[Row] = []

    @property
    def has_failures(self) -> bool:
        """Whether a row failed, timed out or crashed."""
        return any(row.state not in _FINE for row in self.rows)

    def add(self, row: Row) -> None:
        """Keeps, prints and writes it."""
        self.rows.append(row)
        print(f"[{time.monotonic() - self._began_s:5.0f} s] {_line(asdict(row))}", flush=True)
        self.write()

    def write(self) -> None:
        """Writes both files."""
        result = {
            "format": FORMAT,
            "date": self._date,
            "command": self._command,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
        }
        self._json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        self._table.write_text(markdown(result), encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A result. Raises ValueError for a file that is none."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{path} is no result of tests.gpu.first ({FORMAT})")
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """The table: first what is missing, then what failed, then all rows by section."""
    about, rows = result["machine"], result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    commit = (about.get("commit") or "no commit")[:12] + (" with changes" if about.get("modified") else "")
    lines = [f"# {about.get('gpu', 'no device')}, {result['date'][:10]}", ""]
    lines += [f"- MISSING: {row['name']} {row['note']}" for row in rows if row["state"] == "missing"]
    lines += [f"- {versions}; Python {about.get('python')}; driver {about.get('driver')}"]
    lines += [f"- commit {commit}; `{result['command']}`; {result['seconds']} s", ""]
    failed = [row for row in rows if row["state"] not in _FINE]
    lines += [f"- {row['section']}: {row['name']}: {row['state']}: {row['note']}" for row in failed]
    lines += ["", "| | | | |", "| --- | --- | --- | ---: |"]
    for row in rows:
        if row["state"] != "missing":
            told = _figures(row["figures"]) or row["note"]
            text = told if row["state"] == "ok" else f"**{row['state']}** {told}"
            cells = row["section"], row["name"], text.replace("|", "\\|"), f"{row['seconds']:.1f} s"
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What is otherwise in the newer result, as a table; figures where they differ by more than 2%."""
    before, after = _by_name(old), _by_name(new)
    lines = [
        f"{_machine(old)} -> {_machine(new)}",
        "",
        "| | | before | after | |",
        "|---|---|---:|---:|---:|",
    ]
    for key in dict.fromkeys((*before, *after)):
        section, name = key
        one, two = before.get(key), after.get(key)
        states = tuple("" if row is None else row["state"] for row in (one, two))
        if states[0] != states[1]:
            lines.append(f"| {section} | {name} | {states[0] or '-'} | {states[1] or '-'} | |")
        if one is None or two is None:
            continue
        for figure, was in one["figures"].items():
            now = two["figures"].get(figure)
            if now is not None and abs(now - was) > 0.02 * abs(was):
                change = f"{now / was:.2f}x" if was else ""
                told = _number(figure, was), _number(figure, now)
                lines.append(f"| {section} | {name}: {figure} | {told[0]} | {told[1]} | {change} |")
    return "\n".join(lines) + "\n"


def _by_name(result: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["section"], row["name"]): row for row in result["rows"]}


def _machine(result: Mapping[str, Any]) -> str:
    about = result["machine"]
    return f"{about.get('gpu', 'no device')}, {(about.get('commit') or 'no commit')[:12]}"


def _line(row: Mapping[str, Any]) -> str:
    told = " ".join(part for part in (_figures(row["figures"]), row["note"]) if part)
    return f"{row['section']}: {row['name']}: {row['state']} {told} ({row['seconds']:.1f} s)"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(name, value)}" for name, value in figures.items())


def _number(name: str, value: float) -> str:
    """A share as a percentage, others with about three digits."""
    if name.startswith(_SHARES):
        return f"{value:.1%}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
