"""What a run found, as it is written to JSON, and the arithmetic from samples to figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from benchmarks.peers.base import Sample
from benchmarks.plan import Comparison, Entry

FORMAT = 2


class Spread(TypedDict):
    """Percentiles."""

    p10: float
    p50: float
    p90: float
    p99: float


class Figure(TypedDict):
    """What one entry of a workload reached.

    `problem` is there instead of the rest if it could not be measured; `failed` says that it should have.
    """

    label: str
    peer: str
    failed: NotRequired[bool]
    problem: NotRequired[str]
    rounds: NotRequired[int]
    samples: NotRequired[int]
    ms: NotRequired[Spread]
    tokens_per_s: NotRequired[Spread]
    latency_ms: NotRequired[Spread]
    # A rate of the roof, what was reached of it, the share, and the goal for that, if any.
    reached: NotRequired[tuple[str, float, float, float | None]]
    more: NotRequired[dict[str, float]]
    # Of each round.
    median_ms: NotRequired[list[float]]
    first_tokens: NotRequired[list[int]]


class Ratio(TypedDict):
    """One figure over another: the spread over the rounds. `percentile`: of the times, else of tokens/s."""

    ours: str
    theirs: str
    percentile: int | None
    goal: float | None
    ratio: Spread | None
    rounds: int


class WorkloadResult(TypedDict):
    """One workload. `problem`: why it was not run."""

    name: str
    title: str
    unit: str
    figures: list[Figure]
    ratios: list[Ratio]
    problem: NotRequired[str]


class Result(TypedDict):
    """One run. `whole`: every workload of the default shape, so that the README may show it."""

    format: int
    suite: str
    whole: bool
    date: str
    command: str
    shape: str
    seconds: float
    machine: dict[str, Any]
    versions: dict[str, dict[str, str]]
    settings: dict[str, Any]
    roof: dict[str, float]
    workloads: list[WorkloadResult]
    memory: dict[str, int]
    notes: list[str]


def spread(values: Sequence[float]) -> Spread:
    """Percentiles of at least one value."""
    p10, p50, p90, p99 = (_short(value) for value in np.percentile(values, [10, 50, 90, 99]))
    return Spread(p10=p10, p50=p50, p90=p90, p99=p99)


def figure(label: str, entry: Entry, samples: Sequence[Sample], roof: Mapping[str, float]) -> Figure:
    """The figures of what was measured at least once, a sample a round."""
    ns, first = [value for sample in samples for value in sample.ns], samples[0]
    ms = spread([value / 1e6 for value in ns])
    found = Figure(label=label, peer=entry.peer, rounds=len(samples), samples=len(ns), ms=ms)
    if first.tokens:
        found["tokens_per_s"] = spread([first.tokens * 1e9 / value for value in ns])
    latency_ns = [value for sample in samples for value in sample.latency_ns]
    if latency_ns:
        found["latency_ms"] = spread([value / 1e6 for value in latency_ns])
    work = {
        "bytes_per_s": entry.bytes_read or first.bytes_read,
        "flops_per_s": entry.flops or first.flops,
    }
    for rate, amount in work.items():
        if amount:
            per_s = amount / (ms["p50"] / 1e3)
            found["reached"] = rate, _short(per_s), _short(per_s / roof[rate]), entry.goal
    if first.more:
        more = {name: [sample.more[name] for sample in samples] for name in first.more}
        found["more"] = {name: _short(np.mean(values)) for name, values in more.items()}
    found["median_ms"] = [_short(np.median(sample.ns) / 1e6) for sample in samples]
    return found


def ratio(comparison: Comparison, rounds: Mapping[str, Sequence[Sample]]) -> Ratio:
    """A comparison round by round, so that what drifts between rounds cancels out."""
    ours, theirs = rounds.get(comparison.ours, ()), rounds.get(comparison.theirs, ())
    ratios = []
    for mine, other in zip(ours, theirs, strict=False):
        if comparison.percentile is None:
            ratios.append(_tokens_per_s(mine) / _tokens_per_s(other))
        else:
            mine_ns, other_ns = (np.percentile(s.ns, comparison.percentile) for s in (mine, other))
            ratios.append(mine_ns / other_ns)
    return Ratio(
        ours=comparison.ours,
        theirs=comparison.theirs,
        percentile=comparison.percentile,
        goal=comparison.goal,
        ratio=spread(ratios) if ratios else None,
        rounds=len(ratios),
    )


def write(result: Result, path: Path) -> None:
    """As JSON with a figure on a line."""
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


def _tokens_per_s(sample: Sample) -> float:
    # Where a step gives no tokens, steps/s compare as well.
    return max(1, sample.tokens) * 1e9 / float(np.median(sample.ns))


def _short(value: float | np.floating[Any]) -> float:
    """To six digits."""
    return float(f"{float(value):.6g}")
