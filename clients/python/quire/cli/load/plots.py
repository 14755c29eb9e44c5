"""Plots as inline SVG. Colours are CSS classes, which the page defines for light and dark mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from quire.cli.load.summary import number

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 40
_X0, _X1 = _LEFT, _WIDTH - _RIGHT
_Y0, _Y1 = _HEIGHT - _BOTTOM, _TOP
_MAX_TICKS = 9
_FAR_APART = 20

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """A named line. `colour` is a CSS class of the page: c1, c2 or c3. None in `values` is a gap."""

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
    """Round numbers from 0; the last one is at least `high`."""
    raw = high / count if high > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)] if high > 0 else [0.0, 1.0]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within the bounds; fewer if there would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= _MAX_TICKS:
            return found
    return found[:: len(found) // _MAX_TICKS + 1]


def over_time(
    at_s: Sequence[float], lines: Sequence[Line], unit: str, window_s: tuple[float, float], last_s: float
) -> str:
    """Lines over seconds, from 0 on both axes, up to `last_s`. Times outside the window are shaded."""
    known = [value for line in lines for value in line.values if value is not None]
    if not known:
        return _nothing()
    x = _linear(0, last_s, _X0, _X1)
    y_ticks = linear_ticks(max(known))
    y = _linear(0, y_ticks[-1], _Y0, _Y1)
    outside = [(begin, end) for begin, end in ((0.0, window_s[0]), (window_s[1], last_s)) if end > begin]
    parts = [_rect("outside", x(begin), x(end), _Y1) for begin, end in outside]
    parts += _y_axis(y_ticks, y)
    parts += _x_axis([tick for tick in linear_ticks(last_s, 7) if tick <= last_s], x, "seconds")
    for line in lines:
        points = [None if v is None else (x(at), y(v)) for at, v in zip(at_s, line.values, strict=True)]
        parts.append(_path(points, line.colour))
    parts += _tips(at_s, lines, x, lambda at: f"{at:.1f} s", unit)
    return _svg(parts)


def against(
    xs: Sequence[float], lines: Sequence[Line], x_label: str, unit: str, mark: float | None = None
) -> str:
    """Lines with points over numbers, such as rates. The vertical axis is logarithmic for a wide range."""
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
        parts += [_rule("mark", _X0, _X1, y(mark), y(mark)), _label(_X0 + 4, y(mark) - 4, "bound", "small")]
    for line in lines:
        points = [
            None if v is None or (is_logarithmic and not v) else (x(at), y(v))
            for at, v in zip(xs, line.values, strict=True)
        ]
        parts.append(_path(points, line.colour))
        parts += [_dot(point, line.colour, 3.2) for point in points if point]
    parts += _tips(xs, lines, x, lambda at: f"{number(at)} {x_label}", unit)
    return _svg(parts)


def _nothing() -> str:
    return _svg([_label(_WIDTH / 2, _HEIGHT / 2, "nothing was measured", "small", "middle")])


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _label(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(at: tuple[float, float], colour: str, radius: float) -> str:
    return f'<circle class="{colour}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}"/>'


def _rect(kind: str, left: float, right: float, top: float, tip: str = "") -> str:
    """A rectangle down to the horizontal axis. `tip` is its tooltip."""
    size = f'width="{max(0.0, right - left):.1f}" height="{_Y0 - top:.1f}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" {size}>{title}</rect>'


def _y_axis(ticks: Sequence[float], y: Scale) -> list[str]:
    grid = [_rule("grid", _X0, _X1, y(tick), y(tick)) for tick in ticks]
    return grid + [_label(_X0 - 8, y(tick) + 4, number(tick), anchor="end") for tick in ticks]


def _x_axis(ticks: Sequence[float], x: Scale, label: str) -> list[str]:
    parts = [_rule("axis", _X0, _X1, _Y0, _Y0)]
    for tick in ticks:
        parts.append(_rule("axis", x(tick), x(tick), _Y0, _Y0 + 4))
        parts.append(_label(x(tick), _Y0 + 17, number(tick), anchor="middle"))
    return [*parts, _label((_X0 + _X1) / 2, _HEIGHT - 6, label, "small", "middle")]


def _path(points: Sequence[tuple[float, float] | None], colour: str) -> str:
    """A line through the points. A single point between two gaps is a dot."""
    parts, dots = [], []
    for is_there, group in itertools.groupby(points, key=lambda point: point is not None):
        run = [point for point in group if point is not None]
        if is_there and len(run) == 1:
            dots.append(_dot(run[0], colour, 2))
        elif is_there:
            parts.append("M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in run))
    line = f'<path class="line {colour}" d="{" ".join(parts)}"/>' if parts else ""
    return line + "".join(dots)


def _tips(
    xs: Sequence[float], lines: Sequence[Line], x: Scale, name: Callable[[float], str], unit: str
) -> list[str]:
    """Invisible columns with tooltips of their values."""
    at = [x(value) for value in xs]
    borders = [_X0, *((a + b) / 2 for a, b in itertools.pairwise(at)), _X1]
    parts = []
    for i, value in enumerate(xs):
        texts = [f"{line.name} {number(line.values[i])}" for line in lines if line.values[i] is not None]
        if texts:
            tip = f"{name(value)}: {', '.join(texts)} {unit}"
            parts.append(_rect("tip", borders[i], borders[i + 1], _Y1, tip))
    return parts
