"""Turns a result into Markdown."""

from __future__ import annotations

from benchmarks.gpu.results import Part, Result, Row
from benchmarks.gpu.timing import Spread

# How figures are headed, in the order of the columns.
_HEADINGS = {
    "tokens_per_s": "tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "gb_per_s": "GB/s",
    "tflop_per_s": "TFLOP/s",
    "share_of_copy": "of copy",
    "share_of_matmul": "of matmul",
    "share_of_roofline": "of roofline",
    "device_ms": "device-fed ms",
    "device_tokens_per_s": "device-fed tokens/s",
    "device_share_of_roofline": "device-fed, of roofline",
    "host_ms": "host adds ms",
    "share_of_host": "host, of step",
    "quire_over_it": "Quire over it",
}
_EXPLANATION = (
    "Milliseconds are medians, with the least and the most. The roofline of a decode step is the time in"
    " which the copy bandwidth would bring the weights, without the embedding table but with the head, and"
    " the keys and values of all sequences."
)
# In the JSON only.
_HIDDEN = ("device_min_ms", "device_max_ms")


def markdown(result: Result) -> str:
    """Everything."""
    machine = result["machine"]
    title = "Rehearsal on a CPU: figures mean nothing" if result["rehearsal"] else f"GPU: {machine['device']}"
    parts = [
        f"# {title}, {result['date'][:10]}",
        _description(result),
        "## Goals of the design\n\n" + _goals(result["parts"]),
        *(_part(part) for part in result["parts"]),
        _EXPLANATION,
    ]
    return "\n\n".join(parts) + "\n"


def _description(result: Result) -> str:
    machine, roof = result["machine"], result["roof"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines = [f"- {versions}; Python {machine['python']}; {machine['system']}; {machine['cpus']} CPUs"]
    if "driver" in machine:
        memory = f"{machine['memory_bytes'] / 1e9:.0f} GB, {machine['multiprocessors']} multiprocessors"
        lines.append(f"- {machine['device']}, {memory}; driver {machine['driver']}, CUDA {machine['cuda']}")
    if roof is not None:
        copied, multiplied = roof["bytes_per_s"] / 1e12, roof["flops_per_s"] / 1e12
        lines.append(f"- copies {copied:.2f} TB/s, multiplies {multiplied:.0f} TFLOP/s")
    lines.append(f"- commit {machine['commit']}; `{result['command']}`; {result['seconds']:.0f} s")
    return "\n".join(lines)


def _goals(parts: list[Part]) -> str:
    lines: list[tuple[str, ...]] = []
    for part in parts:
        for row in part["rows"]:
            for goal in row.get("goals", []):
                sign = ">=" if goal["at_least"] else "<="
                lines.append(
                    (
                        f"{part['name']}: {row['name']}",
                        _HEADINGS[goal["figure"]],
                        f"{row['figures'][goal['figure']]:.1%}",
                        f"{sign} {goal['bound']:.0%}",
                        "reached" if goal["reached"] else "not reached",
                    )
                )
    return _table(("", "figure", "measured", "goal", ""), lines) if lines else "None was measured."


def _part(part: Part) -> str:
    pieces = [f"## {part['name']} ({part['seconds']:.0f} s)"]
    if part["rows"]:
        known = {name for row in part["rows"] for name in row["figures"]}
        names = [name for name in _HEADINGS if name in known]
        names += sorted(known - set(names) - set(_HIDDEN))
        columns = ("", "ms", *(_HEADINGS.get(name, name.replace("_", " ")) for name in names))
        pieces.append(_table(columns, [_cells(row, names) for row in part["rows"]]))
    pieces += [f"- {note}" for note in part["notes"]]
    if "problem" in part:
        pieces.append(f"**{part['problem']}**")
    return "\n\n".join(pieces)


def _cells(row: Row, names: list[str]) -> tuple[str, ...]:
    figures = row["figures"]
    cells = (_figure(name, figures[name]) if name in figures else "" for name in names)
    return (row["name"], _spread(row["ms"]), *cells)


def _figure(name: str, value: float) -> str:
    return f"{value:.1%}" if "share_" in name else number(value)


def _spread(ms: Spread) -> str:
    return f"{number(ms['median'])} ({number(ms['min'])}-{number(ms['max'])})"


def number(value: float) -> str:
    """About three digits."""
    for bound, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if abs(value) >= bound:
            return f"{value:.{digits}f}"
    return f"{value:.4f}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---", *("---:" for _ in columns[1:])), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
