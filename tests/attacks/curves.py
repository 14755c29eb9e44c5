"""Draws what was done in time under load: `python -m tests.attacks.curves BEFORE.json AFTER.json > FILE.svg`.

Reads what `python -m tests.attacks --only load` wrote. The figure is plain SVG: a few lines and words.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.attacks.overload import DEADLINES_S, TIMES

# Times the capacity, and how much of the capacity was done in time.
_Points: TypeAlias = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 330, 230
_LEFT, _TOP, _GAP = 56, 46, 40
_MOST = 1.1
_COLOURS = {"before": "#b0b0b0", "after": "#0b6e99"}


def main() -> int:
    """Draws. Returns the exit status."""
    found = {
        name: json.loads(Path(path).read_text()) for name, path in zip(_COLOURS, sys.argv[1:3], strict=True)
    }
    print(figure({name: curves(one["outcomes"]) for name, one in found.items()}))
    return 0


def curves(outcomes: Iterable[dict[str, object]]) -> dict[float, _Points]:
    """By deadline."""
    points: dict[float, list[tuple[float, float]]] = {deadline_s: [] for deadline_s in DEADLINES_S}
    for outcome in outcomes:
        notes = outcome["notes"]
        assert isinstance(notes, dict)
        if "times" in notes:
            part = notes["in_time_per_s"] / notes["capacity_per_s"]
            points[notes["deadline_s"]].append((notes["times"], part))
    return {deadline_s: sorted(found) for deadline_s, found in points.items()}


def figure(found: dict[str, dict[float, _Points]]) -> str:
    """A panel for each deadline, a line for each run."""
    width = _LEFT + len(DEADLINES_S) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, deadline_s in enumerate(DEADLINES_S):
        left = _LEFT + number * (_WIDTH + _GAP)
        parts += _axes(left, f"deadlines of {deadline_s:g} s", labelled=number == 0)
        for name, by_deadline in found.items():
            parts += _line(left, by_deadline[deadline_s], name)
    return "\n".join([*parts, "</svg>"])


def _x(left: float, times: float) -> float:
    return left + _WIDTH * (0.04 + 0.92 * math.log(times) / math.log(TIMES[-1]))


def _y(part: float) -> float:
    return _TOP + _HEIGHT * (1 - min(part, _MOST) / _MOST)


def _axes(left: float, title: str, *, labelled: bool) -> Iterable[str]:
    yield f'<text x="{left}" y="{_TOP - 22}" font-size="14">{title}</text>'
    for part in (0, 0.25, 0.5, 0.75, 1.0):
        y = _y(part)
        yield f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
        if labelled:
            yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{part:.0%}</text>'
    if labelled:
        yield f'<text x="{left}" y="{_TOP - 6}" fill="#666">done in time, of the capacity</text>'
    for times in TIMES:
        x = _x(left, times)
        yield f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{times}</text>'
    middle = left + _WIDTH / 2
    yield (
        f'<text x="{middle}" y="{_TOP + _HEIGHT + 38}" text-anchor="middle" fill="#666">'
        "asked, in times of the capacity</text>"
    )


def _line(left: float, points: _Points, name: str) -> Iterable[str]:
    colour = _COLOURS[name]
    places = [(_x(left, times), _y(part)) for times, part in points]
    if not places:
        return
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    # Where lines are apart.
    x, y = places[len(places) // 2]
    yield f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle" fill="{colour}">{name}</text>'


if __name__ == "__main__":
    sys.exit(main())
