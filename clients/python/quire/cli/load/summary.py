"""The figures of runs as tables on a terminal, and the formatting of figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.cli.terminal import escaped
from rich.console import Console
from rich.table import Table
from rich.text import Text

LATENCIES = {
    "ttft_ms": "to first token",
    "tbt_ms": "between tokens",
    "tpot_ms": "time per token",
    "e2e_ms": "whole request",
}
PERCENTILES = ("mean", "p50", "p90", "p99", "max")
_RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "prompt_tokens_per_s": "prompt tokens/s",
}
_NON_TERMINAL_WIDTH = 200
_STYLES = {"client": "bold red", "server": "yellow", "note": "dim"}


def pace_words(pace: dict[str, Any], *, short: bool = False) -> str:
    """A description of a run's pace."""
    if pace["callers"] is not None:
        return f"{pace['callers']} caller{'s' if pace['callers'] > 1 else ''}"
    if pace["rate"] is None:
        return "at the trace's times"
    return f"{number(pace['rate'])}{'/s' if short else ' requests/s, ' + pace['arrivals']}"


def _plain_console() -> Console:
    """A console for standard output. If that is not a terminal, tables and sentences are not truncated."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _NON_TERMINAL_WIDTH
    return console


def number(value: float | None) -> str:
    """A number with three significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return "0" if abs(value) < 5e-4 else text if "e" not in text else f"{value:.4f}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def facts(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the other results, besides the latencies."""
    requests = run["requests"]
    parts = [f"{requests['done']} done of {requests['begun']}"]
    parts += [
        f"{requests[k]} {k.replace('_', ' ')}" for k in ("failed", "unfinished", "cut_off") if requests[k]
    ]
    yield "requests", ", ".join(parts)
    for name, label in _RATES.items():
        yield label, number(run["throughput"][name])
    if (goodput := run["goodput"]) is not None:
        bounds = [
            f"{n} ≤ {number(goodput[k])} ms"
            for k, n in (("ttft_ms", "TTFT"), ("tbt_ms", "TBT"), ("tpot_ms", "TPOT"))
            if goodput[k]
        ]
        rate = number(goodput["good_requests_per_s"])
        yield "goodput", f"{rate} requests/s, {percent(goodput['share'])} with {' and '.join(bounds)}"
    yield from ((f"error {reason}", str(count)) for reason, count in run["errors"].items())
    if (server := run["server"]) is not None:
        yield (
            "server: items in a step",
            f"{number(server['mean_batch'])}, at most {number(server['largest_batch'])}",
        )
        used = f"{percent(server['occupancy_mean'])}, at most {percent(server['occupancy_max'])}"
        yield "server: pages in use", used
        if server["prefix_hit_share"]:
            yield "server: prompt tokens reused", percent(server["prefix_hit_share"])
        yield from ((f"server: refused {reason}", str(count)) for reason, count in server["refusals"].items())
    client = run["client"]
    late, processes = client["lateness_ms"], client["processes"]
    lag_ms = max((p["lag_ms"].get("p99", 0.0) for p in processes), default=0.0)
    cpu = max((p["cpu"] for p in processes), default=0.0)
    yield "client: sent late by", f"p99 {number(late.get('p99'))} ms, max {number(late.get('max'))} ms"
    yield "client: busiest process", f"{percent(cpu)} of a core, event loop late by p99 {number(lag_ms)} ms"


def print_summary(document: dict[str, Any]) -> None:
    """Prints all runs, and if there are several, a table that compares them."""
    console = _plain_console()
    about = document["about"]
    processes = f"{about['processes']} client process{'es' if about['processes'] > 1 else ''}"
    line = f"{about['model']} on {about['device']} at {about['target']}, {about['mode']}, {processes}"
    console.print(Text(escaped(line)))
    for run in document["runs"]:
        console.print()
        console.print(
            Text(pace_words(run["pace"]) + (" (interrupted)" if run["interrupted"] else ""), "bold")
        )
        _print_run(console, run)
    if len(document["runs"]) > 1:
        console.print()
        console.print(_sweep(document["runs"]))


def _table_of(*names: str) -> Table:
    """An empty table. Its first column and those without a name are text, the others numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i and name else "left", no_wrap=True)
    return table


def _print_run(console: Console, run: dict[str, Any]) -> None:
    table = _table_of("ms", *PERCENTILES)
    for name, label in LATENCIES.items():
        cells = [number(run[name].get(p)) for p in PERCENTILES]
        table.add_row(label, *cells)
    console.print(table)
    rest = Table.grid(padding=(0, 2, 0, 0))
    for label, value in facts(run):
        rest.add_row(Text(escaped(label), "dim"), Text(escaped(value)))
    console.print(rest)
    for remark in run["remarks"]:
        console.print(Text(escaped(remark["text"]), _STYLES[remark["who"]]))


def _sweep(runs: list[dict[str, Any]]) -> Table:
    table = _table_of("pace", "requests/s", "tokens/s", "TTFT p50", "p99", "TBT p50", "p99", "good", "lost")
    for run in runs:
        latencies = [number(run[name].get(p)) for name in ("ttft_ms", "tbt_ms") for p in ("p50", "p99")]
        good = percent(run["goodput"]["share"]) if run["goodput"] else "-"
        rates = [number(run["throughput"][name]) for name in ("requests_per_s", "output_tokens_per_s")]
        lost = run["requests"]["failed"] + run["requests"]["unfinished"]
        table.add_row(pace_words(run["pace"], short=True), *rates, *latencies, good, str(lost))
    return table
