"""What a run found, as it is written to JSON, and the arithmetic from samples to figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from benchmarks.peers.base import Sample
from benchmarks.workloads import Comparison, Workload

FORMAT = 1


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
    failed: bool
    problem: NotRequired[str]
    rounds: NotRequired[int]
    samples: NotRequired[int]
    tokens_per_sample: NotRequired[int]
    ms: NotRequired[Spread]
    tokens_per_s: NotRequired[Spread]
    latency_ms: NotRequired[Spread]
    items_per_step: NotRequired[float]
    bytes_per_s: NotRequired[float]
    share_of_read_bandwidth: NotRequired[float]
    flops_per_s: NotRequired[float]
    share_of_matmul_rate: NotRequired[float]
    # Median of each round in tokens/s; null where the entry sat the round out.
    round_tokens_per_s: NotRequired[list[float | None]]
    first_tokens: NotRequired[list[int]]


class Ratio(TypedDict):
    """Tokens/s of one entry over another's: the spread over the rounds in which both were measured."""

    ours: str
    theirs: str
    goal: float | None
    ratio: Spread | None
    rounds: int
    reached: bool | None


class WorkloadResult(TypedDict):
    """One workload."""

    name: str
    title: str
    unit: str
    figures: list[Figure]
    ratios: list[Ratio]


class Result(TypedDict):
    """One run."""

    format: int
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
    p10, p50, p90, p99 = (float(value) for value in np.percentile(np.asarray(values), [10, 50, 90, 99]))
    return Spread(p10=p10, p50=p50, p90=p90, p99=p99)


def figure(
    label: str, peer: str, workload: Workload, rounds: Sequence[Sample | None], roof: dict[str, float]
) -> Figure:
    """The figures of an entry that was measured at least once."""
    samples = [sample for sample in rounds if sample is not None]
    ns = [value for sample in samples for value in sample.ns]
    tokens, latency_ns = samples[0].tokens, [value for sample in samples for value in sample.latency_ns]
    ms = spread([value / 1e6 for value in ns])
    found = Figure(
        label=label,
        peer=peer,
        failed=False,
        rounds=len(samples),
        samples=len(ns),
        tokens_per_sample=tokens,
        ms=ms,
        tokens_per_s=spread([tokens * 1e9 / value for value in ns]),
        round_tokens_per_s=[_tokens_per_s(sample) for sample in rounds],
    )
    if latency_ns:
        found["latency_ms"] = spread([value / 1e6 for value in latency_ns])
    if samples[0].items_per_step:
        found["items_per_step"] = float(np.mean([sample.items_per_step for sample in samples]))
    if workload.bytes_read:
        found["bytes_per_s"] = workload.bytes_read / (ms["p50"] / 1e3)
        found["share_of_read_bandwidth"] = found["bytes_per_s"] / roof["read_bytes_per_s"]
    if workload.flops:
        found["flops_per_s"] = workload.flops / (ms["p50"] / 1e3)
        found["share_of_matmul_rate"] = found["flops_per_s"] / roof["matmul_flops_per_s"]
    return found


def ratio(comparison: Comparison, rounds: dict[str, list[Sample | None]]) -> Ratio:
    """A comparison round by round, so that what drifts between rounds cancels out."""
    pairs = zip(rounds.get(comparison.ours, ()), rounds.get(comparison.theirs, ()), strict=False)
    ratios = []
    for ours, theirs in pairs:
        mine, other = _tokens_per_s(ours), _tokens_per_s(theirs)
        if mine is not None and other is not None:
            ratios.append(mine / other)
    over_rounds = spread(ratios) if ratios else None
    reached = None
    if over_rounds is not None and comparison.goal is not None:
        reached = over_rounds["p50"] >= comparison.goal
    return Ratio(
        ours=comparison.ours,
        theirs=comparison.theirs,
        goal=comparison.goal,
        ratio=over_rounds,
        rounds=len(ratios),
        reached=reached,
    )


def _tokens_per_s(sample: Sample | None) -> float | None:
    return None if sample is None else sample.tokens * 1e9 / float(np.median(sample.ns))
