"""Plots as inline SVG. Colours are classes, which the page defines for light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from service.cli.load.summary import number

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 40
_X0, _X1 = _LEFT, _WIDTH - _RIGHT
_Y0, _Y1 = _HEIGHT - _BOTTOM, _TOP
_MOST_TICKS = 9
_FAR_APART = 20

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """A named line. `colour` is a class of the page: c1, c2 or c3. Where a value is None, it has a gap."""

    name: str
    colour: str
    values: Sequence[float | None]


def _linear(low: float, high: float, at_low: float, at_high: float) -> Scale:
    width = (high - low) or 1.0
    return lambda value: at_low + (value - low) / width * (at_high - at_low)


def _logarithmic(low: float, high: float, at_low: float, at_high: float) -> Scale:
    scale = _linear(math.log(low), math.log(high), at_low, at_high)
    return lambda value: scale(math.log(max(value, low)))


def linear_ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 on; the last one is at least `high`."""
    raw = high / count if high > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)] if high > 0 else [0.0, 1.0]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within the bounds; fewer where there would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= _MOST_TICKS:
            return found
    return found[:: len(found) // _MOST_TICKS + 1]


def over_time(
    at_s: Sequence[float], lines: Sequence[Line], unit: str, window_s: tuple[float, float], last_s: float
) -> str:
    """Lines over seconds, from 0 on both axes, up to `last_s`. What lies outside of the window is shaded."""
    known = [value for line in lines for value in line.values if value is not None]
    if not known:
        return _nothing()
    x_ticks = linear_ticks(last_s, 7)
    x = _linear(0, last_s, _X0, _X1)
    y_ticks = linear_ticks(max(known))
    y = _linear(0, y_ticks[-1], _Y0, _Y1)
    parts = []
    for begin, end in ((0.0, window_s[0]), (window_s[1], last_s)):
        if end > begin:
            place = f'x="{x(begin):.1f}" y="{_Y1}" width="{x(end) - x(begin):.1f}" height="{_Y0 - _Y1}"'
            parts.append(f'<rect class="outside" {place}/>')
    parts += _y_axis(y_ticks, y)
    parts += _x_axis([tick for tick in x_ticks if tick <= last_s], x, "seconds")
    for line in lines:
        points = [None if v is None else (x(at), y(v)) for at, v in zip(at_s, line.values, strict=True)]
        parts.append(_path(points, line.colour))
    parts += _tips(at_s, lines, x, lambda at: f"{at:.1f} s", unit)
    return _svg(parts)


def against(
    xs: Sequence[float], lines: Sequence[Line], x_label: str, unit: str, mark: float | None = None
) -> str:
    """Lines with points over numbers, such as rates. The vertical axis is logarithmic if need be."""
    known = [value for line in lines for value in line.values if value]
    if not known:
        return _nothing()
    x_ticks = linear_ticks(max(xs), 8)
    x = _linear(0, x_ticks[-1], _X0, _X1)
    low, high = min(known), max(known)
    is_logarithmic = high / low > _FAR_APART
    if is_logarithmic:
        low, high = low / 1.3, high * 1.3
        y, y_ticks = _logarithmic(low, high, _Y0, _Y1), log_ticks(low, high)
    else:
        y_ticks = linear_ticks(high)
        y = _linear(0, y_ticks[-1], _Y0, _Y1)
    parts = _y_axis(y_ticks, y) + _x_axis(x_ticks, x, x_label)
    if mark is not None and min(y_ticks) <= mark <= high:
        parts.append(f'<line class="mark" x1="{_X0}" x2="{_X1}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text class="small" x="{_X0 + 4}" y="{y(mark) - 4:.1f}">bound</text>')
    for line in lines:
        points = [
            None if v is None or (is_logarithmic and not v) else (x(at), y(v))
            for at, v in zip(xs, line.values, strict=True)
        ]
        parts.append(_path(points, line.colour))
        parts += [
            f'<circle class="{line.colour}" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3.2"/>' for p in points if p
        ]
    parts += _tips(xs, lines, x, lambda at: f"{number(at)} {x_label}", unit)
    return _svg(parts)


def histogram(
    edges: Sequence[float], counts: Sequence[int], colour: str, marks: Sequence[tuple[str, float]], unit: str
) -> str:
    """Bars over a logarithmic axis, and named values."""
    if not counts or not any(counts):
        return _nothing()
    low, high = edges[0], edges[-1]
    x = _logarithmic(low, high, _X0, _X1)
    y_ticks = linear_ticks(max(counts), 4)
    y = _linear(0, y_ticks[-1], _Y0, _Y1 + 14)
    parts = _y_axis(y_ticks, y)
    parts += _x_axis(log_ticks(low, high), x, unit)
    for (begin, end), count in zip(itertools.pairwise(edges), counts, strict=True):
        if count:
            top = min(y(count), _Y0 - 1)
            parts.append(
                f'<rect class="bar {colour}" x="{x(begin) + 0.5:.1f}" y="{top:.1f}" '
                f'width="{max(1.0, x(end) - x(begin) - 1):.1f}" height="{_Y0 - top:.1f}">'
                f"<title>{number(begin)} to {number(end)} {escape(unit)}: {count}</title></rect>"
            )
    right_of = -math.inf
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if not low <= value <= high:
            continue
        at = x(value)
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_Y1 + 6}" y2="{_Y0}"/>')
        if at - right_of > 34:
            anchor = "end" if at > _X1 - 30 else "start" if at < _X0 + 12 else "middle"
            parts.append(
                f'<text class="small" x="{at:.1f}" y="{_Y1 + 2}" text-anchor="{anchor}">{escape(name)}</text>'
            )
            right_of = at
    return _svg(parts)


def _nothing() -> str:
    middle = f'x="{_WIDTH / 2}" y="{_HEIGHT / 2}"'
    return _svg([f'<text class="small" {middle} text-anchor="middle">nothing was measured</text>'])


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _y_axis(ticks: Sequence[float], y: Scale) -> list[str]:
    parts = []
    for tick in ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_X0}" x2="{_X1}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_X0 - 8}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    return parts


def _x_axis(ticks: Sequence[float], x: Scale, label: str) -> list[str]:
    parts = [f'<line class="axis" x1="{_X0}" x2="{_X1}" y1="{_Y0}" y2="{_Y0}"/>']
    for tick in ticks:
        parts.append(f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_Y0}" y2="{_Y0 + 4}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{_Y0 + 17}" text-anchor="middle">{number(tick)}</text>')
    middle = (_X0 + _X1) / 2
    parts.append(
        f'<text class="small" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
    )
    return parts


def _path(points: Sequence[tuple[float, float] | None], colour: str) -> str:
    """A line through the points that there are; a single one between two gaps is a dot."""
    parts, dots = [], []
    for is_there, group in itertools.groupby(points, key=lambda point: point is not None):
        run = [point for point in group if point is not None]
        if is_there and len(run) == 1:
            dots.append(f'<circle class="{colour}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2"/>')
        elif is_there:
            parts.append("M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in run))
    line = f'<path class="line {colour}" d="{" ".join(parts)}"/>' if parts else ""
    return line + "".join(dots)


def _tips(
    xs: Sequence[float], lines: Sequence[Line], x: Scale, name: Callable[[float], str], unit: str
) -> list[str]:
    """Invisible columns that say their values to a pointer."""
    at = [x(value) for value in xs]
    borders = [_X0, *((a + b) / 2 for a, b in itertools.pairwise(at)), _X1]
    parts = []
    for i, value in enumerate(xs):
        texts = [f"{line.name} {number(line.values[i])}" for line in lines if line.values[i] is not None]
        if texts:
            width = max(0.0, borders[i + 1] - borders[i])
            tip = escape(f"{name(value)}: {', '.join(texts)} {unit}")
            parts.append(
                f'<rect class="tip" x="{borders[i]:.1f}" y="{_Y1}" width="{width:.1f}" height="{_Y0 - _Y1}">'
                f"<title>{tip}</title></rect>"
            )
    return parts
