"""Formats a result as tables for the terminal, the Markdown file and docs/reports/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import machine
from benchmarks.results import Figure, Ratio, Result, WorkloadResult
from benchmarks.workloads import EXECUTOR, LLAMA_CPP, SERVICE, TRANSFORMERS

_RATE_UNITS = {"bytes_per_s": ("GB/s", 1e9), "flops_per_s": ("GFLOP/s", 1e9)}
_Row = Sequence[str]
# The most that a worker may hold, as times its file and the KV.
MEMORY_GOAL = 1.15


def markdown(result: Result) -> str:
    """The whole report."""
    parts = [f"# Benchmark of {result['date'][:10]}", description(result), f"Command: `{result['command']}`"]
    parts += [f"## {workload['title']}\n\n{_figures(workload)}" for workload in result["workloads"]]
    ratios = _ratios(result, only_with_goal=False)
    if ratios:
        parts.append(f"## Ratios\n\nOf tokens/s.\n\n{ratios}")
    parts.append("## Peak memory (VmHWM)\n\n" + _memory(result))
    parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in result["notes"]))
    parts.append("## Versions\n\n" + "\n".join(_version_lines(result)))
    return "\n\n".join(parts) + "\n"


def _memory(result: Result) -> str:
    """Of each process, and beside it what those with a quantised file must hold."""
    memory, held = result["memory"], result.get("held", {})
    if not held:
        return _table(("process", "MB"), [(name, f"{size / 1e6:.0f}") for name, size in memory.items()])
    rows = [
        (name, f"{size / 1e6:.0f}", *_held_cells(name, size, held.get(name))) for name, size in memory.items()
    ]
    return _table(("process", "MB", "file and KV, MB", "times these", "goal", ""), rows)


def _held_cells(name: str, size: int, held: int | None) -> _Row:
    if held is None:
        return "", "", "", ""
    times = size / held
    goal = ("", "")
    if name.endswith("worker"):
        goal = f"{MEMORY_GOAL:g}", "reached" if times <= MEMORY_GOAL else "not reached"
    return f"{held / 1e6:.0f}", _number(times), *goal


def performance_block(result: Result, source: str) -> str:
    """The tables of docs/reports/performance.md: competitors and goals. `source`: path of the result."""
    group = result.get("group")
    memory = ["Peak memory:", _memory(result)] if group else []
    return "\n\n".join(
        [
            f"### {cpu(result)}" + (f": {group}" if group else ""),
            description(result),
            _side_by_side(result),
            "Tokens/s of one over the other, against the goals of the design:",
            _ratios(result, only_with_goal=True),
            *memory,
            f"From [{source}](../../{source}), by `python -m benchmarks.tables`. `make bench"
            + (f' ARGS="--rows {group}"' if group else "")
            + "` measures anew.",
        ]
    )


def cpu(result: Result) -> str:
    """The kind of CPU: "AMD EPYC, avx2, 2 cores"."""
    about = result["machine"]
    parts = (machine.name(about), machine.instruction_set(about), f"{about['cores']} cores")
    return ", ".join(part for part in parts if part)


def readme_table(results: Sequence[Result]) -> str:
    """The table of the README: tokens/s of the service over others', a column for each kind of CPU."""
    titles = dict.fromkeys(workload["title"] for result in results for workload in result["workloads"])
    found = [{w["title"]: _over(w) for w in result["workloads"]} for result in results]
    rows = [(title, *(over.get(title, "") for over in found)) for title in titles]
    columns = [f"{cpu(result)} ({(result['machine']['commit'] or '')[:7]})" for result in results]
    return _table(("", *columns), [row for row in rows if any(row[1:])])


def _over(workload: WorkloadResult) -> str:
    """The ratios of the service to transformers and llama.cpp: "3.1, 0.97"; "" if it is not compared."""
    found = {ratio["theirs"]: ratio["ratio"] for ratio in workload["ratios"] if ratio["ours"] == SERVICE}
    if TRANSFORMERS not in found:
        return ""
    ratios = (found[name] for name in (TRANSFORMERS, LLAMA_CPP))
    return ", ".join(_number(ratio["p50"]) if ratio else "-" for ratio in ratios)


def description(result: Result) -> str:
    """A paragraph with the machine, the model and the versions."""
    about, roof = result["machine"], result["roof"]
    commit = (about["commit"] or "no commit")[:12] + (" with changes" if about["modified"] else "")
    if about.get("against"):
        commit += f", before: {about['against'][:12]}"
    parts = (
        f"{about['cores']} cores",
        machine.instruction_set(about),
        f"{about['memory_bytes'] / 1e9:.0f} GB",
    )
    hardware = ", ".join(part for part in parts if part)
    reaches = ""
    if roof:
        reaches = f", which reads {roof['bytes_per_s'] / 1e9:.1f} GB/s"
        reaches += f" and multiplies {roof['flops_per_s'] / 1e9:.0f} GFLOP/s in torch"
    return (
        f"Shape {result['shape']}, random {result.get('group') or 'bfloat16'} weights,"
        f" {result['settings']['threads']} threads on {machine.name(about)} ({hardware}){reaches}."
        f" {_peer_versions(result)}. Commit {commit}, {result['date'][:10]}."
        " Medians over rounds in which the competitors took turns, with the 10th and 90th percentile."
    )


def _figures(workload: WorkloadResult) -> str:
    columns = ("", f"ms per {workload['unit']}", "tokens/s", "reached", "of the roof", "rounds", "")
    return _table(columns, [_figure_row(figure) for figure in workload["figures"]])


def _figure_row(figure: Figure) -> _Row:
    if "ms" not in figure:
        return (figure["label"], figure.get("problem", ""), "", "", "", "0", "")
    tokens_per_s = _number(figure["tokens_per_s"]["p50"])
    reached = share = ""
    if "reached" in figure:
        rate, per_s, of_roof = figure["reached"][:3]
        unit, scale = _RATE_UNITS[rate]
        value = per_s / scale
        reached, share = f"{value:.1f} {unit}" if unit == "GB/s" else f"{value:.0f} {unit}", f"{of_roof:.0%}"
    more = [f"{name} {_number(value)}" for name, value in figure.get("more", {}).items()]
    if "latency_ms" in figure:
        latency = figure["latency_ms"]
        more.insert(0, f"call p50 {_number(latency['p50'])}, p99 {_number(latency['p99'])} ms")
    rounds = str(figure["rounds"])
    return (figure["label"], _spread(figure["ms"]), tokens_per_s, reached, share, rounds, ", ".join(more))


def _ratios(result: Result, *, only_with_goal: bool) -> str:
    rows = [
        (workload["title"], ratio["ours"], *_ratio_cells(ratio))
        for workload in result["workloads"]
        for ratio in workload["ratios"]
        if ratio["goal"] is not None or not only_with_goal
    ]
    return _table(("workload", "of", "over", "ratio", "goal", ""), rows) if rows else ""


def _ratio_cells(ratio: Ratio) -> _Row:
    over, goal, found = (ratio[name] for name in ("theirs", "goal", "ratio"))
    if found is None:
        return over, "not measured", "" if goal is None else f"{goal:g}", ""
    if goal is None:
        return over, _spread(found), "", ""
    return over, _spread(found), f"{goal:g}", _verdict(found["p50"], goal)


def _verdict(value: float, goal: float) -> str:
    return "reached" if value >= goal else "not reached"


def _side_by_side(result: Result) -> str:
    measured = {figure["label"] for workload in result["workloads"] for figure in workload["figures"]}
    labels = [label for label in (TRANSFORMERS, LLAMA_CPP, EXECUTOR, SERVICE) if label in measured]
    rows, problems = [], list[str]()
    for workload in result["workloads"]:
        figures = {figure["label"]: figure for figure in workload["figures"]}
        if SERVICE in figures:
            cells = [_spread(figures[label]["ms"]) if "ms" in figures[label] else "-" for label in labels]
            rows.append((workload["title"], *cells))
            problems += [
                f"- {workload['title']}, {label}: {figures[label]['problem']}"
                for label in labels
                if "ms" not in figures[label]
            ]
    return "\n\n".join([_table(("ms per step", *labels), rows), *(["\n".join(problems)] if problems else [])])


def _table(columns: _Row, rows: Sequence[_Row]) -> str:
    """A Markdown table. The first column is left-aligned, the others right-aligned."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _peer_versions(result: Result) -> str:
    found: dict[str, str] = {}
    for versions in result["versions"].values():
        found |= versions
    named = ("torch", "transformers", "llama-cpp-python", "grpcio")
    return ", ".join(f"{name} {found[name]}" for name in named if name in found)


def _version_lines(result: Result) -> list[str]:
    about = result["machine"]
    lines = [f"- Python {about['python']}, {about['system']}", f"- flags: {' '.join(about['flags'])}"]
    for peer, versions in result["versions"].items():
        lines.append(f"- {peer}: " + "; ".join(f"{name} {value}" for name, value in versions.items()))
    return lines


def _spread(spread: Mapping[str, float]) -> str:
    return f"{_number(spread['p50'])} ({_number(spread['p10'])}-{_number(spread['p90'])})"


def _number(value: float) -> str:
    """A number with about three digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
