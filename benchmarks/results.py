"""The results of a run as JSON, and the computation of figures from samples.

Figures and ratios are plain JSON dicts. Their contents are defined here and in `run.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.peers.base import Sample
from benchmarks.plan import Comparison, Entry

FORMAT = 2

Figure = dict[str, Any]
Ratio = dict[str, Any]
WorkloadResult = dict[str, Any]
Result = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of at least one value."""
    shares = (10, 50, 90, 99)
    found = np.percentile(values, shares)
    return {f"p{share}": _short(value) for share, value in zip(shares, found, strict=True)}


def figure(entry: Entry, samples: Sequence[Sample], roof: Mapping[str, float]) -> Figure:
    """A figure from at least one sample; there is one sample for each round.

    `ms`, `tokens_per_s`, and where calls are no steps `latency_ms`, are spreads; `reached` is a rate of the
    roof, what was reached of it, and the share; `more` holds means; `median_ms` is by round.
    """
    ns, first = [value for sample in samples for value in sample.ns], samples[0]
    ms = spread([value / 1e6 for value in ns])
    found: Figure = {
        "label": entry.label,
        "peer": entry.peer,
        "rounds": len(samples),
        "samples": len(ns),
        "ms": ms,
        "tokens_per_s": spread([first.tokens * 1e9 / value for value in ns]),
    }
    latency_ns = [value for sample in samples for value in sample.latency_ns]
    if latency_ns:
        found["latency_ms"] = spread([value / 1e6 for value in latency_ns])
    bytes_read, flops = entry.bytes_read or first.bytes_read, entry.flops or first.flops
    for rate, amount in (("bytes_per_s", bytes_read), ("flops_per_s", flops)):
        if amount and rate in roof:
            per_s = amount / (ms["p50"] / 1e3)
            found["reached"] = [rate, _short(per_s), _short(per_s / roof[rate])]
    if first.more:
        found["more"] = {
            name: _short(np.mean([sample.more[name] for sample in samples])) for name in first.more
        }
    found["median_ms"] = [_short(np.median(sample.ns) / 1e6) for sample in samples]
    return found


def ratio(comparison: Comparison, rounds: Mapping[str, Sequence[Sample]]) -> Ratio:
    """A comparison for each round, so that drift between rounds cancels out. None without common rounds."""
    ratios = []
    pairs = zip(rounds.get(comparison.ours, ()), rounds.get(comparison.theirs, ()), strict=False)
    for ours, theirs in pairs:
        ratios.append(ours.tokens / np.median(ours.ns) / (theirs.tokens / np.median(theirs.ns)))
    found = {"ratio": spread(ratios) if ratios else None, "rounds": len(ratios)}
    return {name: getattr(comparison, name) for name in ("ours", "theirs", "goal")} | found


def name_of(result: Result) -> str:
    """The name of the committed result of this kind of CPU, without suffix."""
    group = result.get("group")
    return machine.slug(result["machine"]) + (f"-{group}" if group else "")


def write(result: Result, path: Path) -> None:
    """JSON with one figure per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump(result) + "\n", encoding="utf-8")


def _dump(value: object, depth: int = 0) -> str:
    if not isinstance(value, dict | list) or not value or depth > 3:
        return json.dumps(value)
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_dump(part, depth + 1)}" for key, part in value.items()]
    else:
        parts = [_dump(part, depth + 1) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{indent}" + f",\n{indent}".join(parts) + f"\n{indent[1:]}{closing}"


def _short(value: float | np.floating[Any]) -> float:
    """Rounds to six digits."""
    return float(f"{float(value):.6g}")
