"""Turns a result into tables: for the terminal, for the Markdown file beside the JSON, and for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.results import Figure, Ratio, Result, Spread, WorkloadResult
from benchmarks.workloads import EXECUTOR, LLAMA_CPP, SERVICE, TRANSFORMERS


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text in rows. The first column is aligned to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_result(result: Result, console: Console) -> None:
    """Everything, on the terminal."""
    for table in tables(result):
        rich_table = RichTable(title=escape(table.title), title_justify="left")
        for index, column in enumerate(table.columns):
            rich_table.add_column(column, justify="right" if index else "left")
        for row in table.rows:
            rich_table.add_row(*(escape(cell) for cell in row))
        console.print(rich_table)
    for note in result["notes"]:
        console.print(f"- {escape(note)}", highlight=False)


def markdown(result: Result) -> str:
    """Everything, as Markdown."""
    parts = [f"# Benchmark of {result['date'][:10]}", description(result), f"Command: `{result['command']}`"]
    parts += [f"## {table.title}\n\n{_markdown_table(table)}" for table in tables(result)]
    parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in result["notes"]))
    parts.append("## Versions\n\n" + "\n".join(_version_lines(result)))
    return "\n\n".join(parts) + "\n"


def readme_block(result: Result, source: str) -> str:
    """What the README says: the competitors side by side, and the goals. `source`: path of the result."""
    return "\n\n".join(
        [
            description(result),
            _markdown_table(_side_by_side(result)),
            "Tokens/s of one over the other, against the goals of the design:",
            _markdown_table(_goals(result, only_with_goal=True)),
            f"From [{source}]({source}), by `python -m benchmarks.readme`. `make bench` measures anew.",
        ]
    )


def description(result: Result) -> str:
    """One paragraph: what was measured, where, and with what."""
    machine, roof = result["machine"], result["roof"]
    commit = (machine["commit"] or "no commit")[:12] + (" with changes" if machine["modified"] else "")
    flags = [name for name in machine["flags"] if name in ("avx512_bf16", "amx_bf16")]
    hardware = ", ".join([f"{machine['cores']} cores", *flags, f"{machine['memory_bytes'] / 1e9:.0f} GB"])
    return (
        f"Shape {result['shape']}, random bfloat16 weights, {result['settings']['threads']} threads on"
        f" {machine['cpu']} ({hardware}), which reads {roof['read_bytes_per_s'] / 1e9:.1f} GB/s"
        f" and multiplies {roof['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s in bfloat16."
        f" {_peer_versions(result)}. Commit {commit}, {result['date'][:10]}."
        " Medians over rounds in which the competitors took turns, with the 10th and 90th percentile."
    )


def tables(result: Result) -> list[Table]:
    """The figures of each workload, the comparisons, and the memory."""
    found = [_figures(workload) for workload in result["workloads"]]
    found.append(_goals(result, only_with_goal=False))
    rows = [(name, f"{size / 1e6:.0f}") for name, size in result["memory"].items()]
    return [*found, Table("Peak memory (VmHWM)", ("process", "MB"), rows)]


def _figures(workload: WorkloadResult) -> Table:
    columns = ("", f"ms per {workload['unit']}", "tokens/s", "reached", "of the roof", "batch", "rounds")
    return Table(workload["title"], columns, [_figure_row(figure) for figure in workload["figures"]])


def _figure_row(figure: Figure) -> Sequence[str]:
    if "ms" not in figure:
        return (figure["label"], figure.get("problem", ""), "", "", "", "", "0")
    reached, share = "", ""
    if "bytes_per_s" in figure:
        reached = f"{figure['bytes_per_s'] / 1e9:.1f} GB/s"
        share = f"{figure['share_of_read_bandwidth']:.0%}"
    elif "flops_per_s" in figure:
        reached = f"{figure['flops_per_s'] / 1e9:.0f} GFLOP/s"
        share = f"{figure['share_of_matmul_rate']:.0%}"
    elif "latency_ms" in figure:
        latency = figure["latency_ms"]
        reached = f"call p50 {_number(latency['p50'])}, p99 {_number(latency['p99'])} ms"
    batch = f"{figure['items_per_step']:.1f}" if "items_per_step" in figure else ""
    tokens_per_s, rounds = _number(figure["tokens_per_s"]["p50"]), str(figure["rounds"])
    return (figure["label"], _spread(figure["ms"]), tokens_per_s, reached, share, batch, rounds)


def _goals(result: Result, *, only_with_goal: bool) -> Table:
    rows = [
        (workload["title"], ratio["ours"], ratio["theirs"], *_ratio_cells(ratio))
        for workload in result["workloads"]
        for ratio in workload["ratios"]
        if ratio["goal"] is not None or not only_with_goal
    ]
    return Table("Ratios of tokens/s", ("workload", "of", "over", "ratio", "goal", ""), rows)


def _ratio_cells(ratio: Ratio) -> tuple[str, str, str]:
    goal = "" if ratio["goal"] is None else f"{ratio['goal']:g}"
    if ratio["ratio"] is None:
        return "not measured", goal, ""
    verdict = {True: "reached", False: "not reached", None: ""}[ratio["reached"]]
    return _spread(ratio["ratio"]), goal, verdict


def _side_by_side(result: Result) -> Table:
    labels = (TRANSFORMERS, LLAMA_CPP, EXECUTOR, SERVICE)
    rows = []
    for workload in result["workloads"]:
        figures = {figure["label"]: figure for figure in workload["figures"]}
        if SERVICE in figures:
            cells = [_spread(figures[label]["ms"]) if "ms" in figures[label] else "-" for label in labels]
            rows.append((workload["title"], *cells))
    return Table("", ("ms per step", *labels), rows)


def _markdown_table(table: Table) -> str:
    lines = [table.columns, ["---", *("---:" for _ in table.columns[1:])], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _peer_versions(result: Result) -> str:
    found: dict[str, str] = {}
    for versions in result["versions"].values():
        found |= versions
    named = ("torch", "transformers", "llama-cpp-python", "grpcio")
    return ", ".join(f"{name} {found[name]}" for name in named if name in found)


def _version_lines(result: Result) -> list[str]:
    machine = result["machine"]
    lines = [f"- Python {machine['python']}, {machine['system']}", f"- flags: {' '.join(machine['flags'])}"]
    for peer, versions in result["versions"].items():
        lines.append(f"- {peer}: " + "; ".join(f"{name} {value}" for name, value in versions.items()))
    return lines


def _spread(spread: Spread) -> str:
    return f"{_number(spread['p50'])} ({_number(spread['p10'])}-{_number(spread['p90'])})"


def _number(value: float) -> str:
    """About three digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
