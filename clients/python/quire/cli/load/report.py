"""The results of `quire load` as a self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from quire.cli.load.plots import Line, against, over_time
from quire.cli.load.summary import LATENCIES, PERCENTILES, facts, number, pace_words, percent
from quire.cli.terminal import escaped

Figures = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1d232b; --soft: #66707c; --rule: #e3e7ec; --shade: #8a94a01a;
  --c1: #1f6feb; --c2: #d9480f; --c3: #0c8a6a; --bad: #b42318; --bad-back: #fdecea; --warn: #8a5a00;
  --warn-back: #fff5dd; --good: #17663f; --good-back: #e5f5ec; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161b; --card: #1a2027; --ink: #e5e9ee; --soft: #98a3b0; --rule: #2b333d; --shade: #98a3b014;
  --c1: #6aa7ff; --c2: #ff9058; --c3: #45cfa4; --bad: #ff9d92; --bad-back: #3a1a18; --warn: #f3c761;
  --warn-back: #352a10; --good: #7fd8a6; --good-back: #14301f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 25px; margin: 0 0 2px; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 40px 0 12px; padding-top: 20px; border-top: 1px solid var(--rule); }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 6px; }
h3 small { color: var(--soft); font-weight: 400; font-size: 12.5px; margin-left: 8px; }
.about { color: var(--soft); margin: 0 0 18px; overflow-wrap: anywhere; }
.remark { border-radius: 8px; padding: 9px 14px; margin: 8px 0; font-weight: 500; }
.client { background: var(--bad-back); color: var(--bad); }
.server { background: var(--warn-back); color: var(--warn); }
.fine { background: var(--good-back); color: var(--good); }
.note { color: var(--soft); padding: 2px 14px; font-weight: 400; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin: 16px 0; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 25px; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.tile b small { font-size: 14px; font-weight: 500; color: var(--soft); }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.card { padding: 14px 16px; margin: 0; min-width: 0; }
.plots + .plots, .plots + .cards, .cards + .plots { margin-top: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px;
  align-items: start; }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; flex-wrap: wrap; }
.key { font-size: 12.5px; color: var(--soft); }
.key i { display: inline-block; width: 11px; height: 3px; border-radius: 2px; margin: 0 5px 3px 12px; }
.key i.c1 { background: var(--c1); } .key i.c2 { background: var(--c2); } .key i.c3 { background: var(--c3); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); opacity: .6; }
.line { fill: none; stroke-width: 1.9; stroke-linejoin: round; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
circle.c1 { fill: var(--c1); } circle.c2 { fill: var(--c2); } circle.c3 { fill: var(--c3); }
.mark { stroke: var(--ink); stroke-dasharray: 3 3; opacity: .55; }
.outside { fill: var(--shade); } .tip { fill: transparent; } .tip:hover { fill: var(--shade); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 5px 0 5px 10px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
.facts td { white-space: normal; } .facts td:first-child { color: var(--soft); white-space: nowrap; }
footer { color: var(--soft); font-size: 13px; margin-top: 28px; }
@media print { body { background: none; } .card, .tile { break-inside: avoid; } }
"""


def page(document: Figures) -> str:
    """The page as HTML."""
    about, runs = document["about"], document["runs"]
    body = [_header(about)]
    if len(runs) > 1:
        body.append(_sweep(runs))
    body += [_run(run, about, has_title=len(runs) > 1) for run in runs]
    body.append(
        "<footer>Latencies count from the intended start of a request. Shaded: not counted (warm-up, and "
        "after the window).</footer>"
    )
    title = escape(f"quire load: {_shown(about['model'])}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _shown(value: object) -> str:
    """Untrusted text, escaped for HTML."""
    return escape(escaped(str(value)))


def _header(about: Figures) -> str:
    lengths = f"prompts of {about['prompt_tokens']} tokens, outputs of {about['output_tokens']}"
    if about["shared_prefix_tokens"] not in ("0", "trace"):
        lengths += (
            f", {about['shared_prefix_tokens']} of a prompt shared ({about['shared_prefixes']} prefixes)"
        )
    if about["prompt_tokens"] == "trace":
        lengths = "requests of a trace"
    batch = f" of {about['batch']}" if about["mode"] == "batch" else ""
    parts = [
        f"{about['device']}, {about['dtype']}, Quire {about['server_version']} at {about['target']}",
        f"{about['mode']}{batch}, {lengths}, seed {about['seed']}",
        f"{about['processes']} client process{'es' if about['processes'] > 1 else ''} on {about['client']}",
        about["taken_at"].replace("T", " ").replace("+00:00", " UTC"),
    ]
    text = " · ".join(_shown(part) for part in parts)
    return f"<h1>{_shown(about['model'])} under load</h1><p class='about'>{text}</p>"


def _run(run: Figures, about: Figures, *, has_title: bool) -> str:
    words = _shown(pace_words(run["pace"]) + (" (interrupted)" if run["interrupted"] else ""))
    head = f"<h2>{words}</h2>" if has_title else f"<h3>{words}, {number(run['window_s'])} s</h3>"
    remarks = "".join(
        f"<div class='remark {escape(remark['who'])}'>{_shown(remark['text'])}</div>"
        for remark in run["remarks"]
    )
    if not any(remark["who"] == "client" for remark in run["remarks"]):
        late = run["client"]["lateness_ms"].get("p99")
        text = (
            f"requests were sent within {number(late)} ms of their time"
            if late is not None
            else "nothing was sent"
        )
        bound = f"(99 of 100; bound {number(about['max_lateness_ms'])} ms)"
        remarks = f"<div class='remark fine'>The client was not the limit: {text} {bound}.</div>" + remarks
    return head + remarks + _tiles(run) + _plots(run) + _tables(run)


def _tiles(run: Figures) -> str:
    tiles = [
        (f"{number(run[name].get(p))} <small>ms</small>", f"{label}, {p}")
        for name, label in (("ttft_ms", "to the first token"), ("tbt_ms", "between tokens"))
        for p in ("p50", "p99")
    ]
    tiles += [
        (number(run["throughput"]["output_tokens_per_s"]), "output tokens/s"),
        (number(run["throughput"]["requests_per_s"]), "requests/s"),
    ]
    if (goodput := run["goodput"]) is not None:
        tiles.append((percent(goodput["share"]), "of requests were good"))
    shown = "".join(f"<div class='tile'><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return f"<div class='tiles'>{shown}</div>"


def _figure(title: str, unit: str, plot: str, lines: Sequence[Line] = ()) -> str:
    key = "".join(f"<i class='{line.colour}'></i>{escape(line.name)}" for line in lines)
    key = f"<span class='key'>{key}</span>" if key else ""
    head = f"<h3>{escape(title)}<small>{escape(unit)}</small></h3>"
    return f"<figure class='card'><div class='head'>{head}{key}</div>{plot}</figure>"


def _plots(run: Figures) -> str:
    series = run["series"]
    client, server = series["client"], series["server"]
    window = (series["begin_s"], series["end_s"])

    def timed(title: str, unit: str, at_s: Sequence[float], lines: Sequence[Line]) -> str:
        plot = over_time(at_s, lines, unit, window, series["last_s"])
        return _figure(title, unit, plot, lines if len(lines) > 1 else ())

    at_s = client["at_s"]
    figures = []
    for name, title in (("ttft_ms", "Time to first token"), ("tbt_ms", "Time between tokens")):
        lines = [Line(p, colour, client[f"{name}_{p}"]) for p, colour in (("p50", "c1"), ("p99", "c2"))]
        figures.append(timed(title, "ms", at_s, lines))
    figures.append(timed("Output", "tokens/s", at_s, [Line("output", "c1", client["output_tokens_per_s"])]))
    figures.append(timed("Under way", "requests", at_s, [Line("under way", "c1", client["in_flight"])]))
    if server["at_s"]:
        at_s = server["at_s"]
        figures.append(timed("Server: batch", "items in a step", at_s, [Line("mean", "c3", server["batch"])]))
        used = [None if share is None else share * 100 for share in server["occupancy"]]
        figures.append(timed("Server: pages in use", "%", at_s, [Line("in use", "c3", used)]))
    return f"<div class='plots'>{''.join(figures)}</div>"


def _tables(run: Figures) -> str:
    rows = []
    for name, label in LATENCIES.items():
        cells = "".join(f"<td>{number(run[name].get(p))}</td>" for p in PERCENTILES)
        rows.append(f"<tr><td>{escape(label)}</td>{cells}</tr>")
    names = "".join(f"<th>{name}</th>" for name in PERCENTILES)
    latencies = f"<table><tr><th>milliseconds</th>{names}</tr>{''.join(rows)}</table>"
    rest = "".join(f"<tr><td>{_shown(name)}</td><td>{_shown(value)}</td></tr>" for name, value in facts(run))
    return (
        f"<div class='cards'><div class='card scroll'>{latencies}</div>"
        f"<div class='card scroll'><table class='facts'>{rest}</table></div></div>"
    )


def _sweep(runs: Sequence[Figures]) -> str:
    """A comparison of all runs: results over the rate or the number of callers."""
    by_rate = all(run["pace"]["rate"] is not None for run in runs)
    key, label = ("rate", "requests/s asked") if by_rate else ("callers", "callers")
    ordered = sorted(runs, key=lambda run: run["pace"][key] or 0)
    xs = [float(run["pace"][key] or 0) for run in ordered]
    goodput = next((run["goodput"] for run in ordered if run["goodput"]), None) or {}
    figures = []
    for name, title in (("ttft_ms", "Time to first token"), ("tbt_ms", "Time between tokens")):
        lines = [
            Line(p, colour, [run[name].get(p) for run in ordered])
            for p, colour in (("p50", "c1"), ("p99", "c2"))
        ]
        figures.append(_figure(title, "ms", against(xs, lines, label, "ms", goodput.get(name)), lines))
    rates = [Line("done", "c1", [run["throughput"]["requests_per_s"] for run in ordered])]
    if goodput:
        good = [run["goodput"]["good_requests_per_s"] for run in ordered]
        rates.append(Line("good", "c3", good))
    figures.append(_figure("Requests", "requests/s", against(xs, rates, label, "requests/s"), rates))
    tokens = [Line("tokens/s", "c1", [run["throughput"]["output_tokens_per_s"] for run in ordered])]
    figures.append(_figure("Output", "tokens/s", against(xs, tokens, label, "tokens/s")))
    limited = [
        pace_words(run["pace"], short=True)
        for run in runs
        if any(r["who"] == "client" for r in run["remarks"])
    ]
    remark = ""
    if limited:
        remark = f"<div class='remark client'>The client was the limit at {_shown(', '.join(limited))}.</div>"
    return f"{remark}<div class='plots'>{''.join(figures)}</div>"
