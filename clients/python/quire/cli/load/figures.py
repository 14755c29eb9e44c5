"""Computes the figures of a run from its records, as plain data for a JSON file.

A figure is {"value": ..., "low": ..., "high": ...}. The bounds are those of `noise`, and absent if there is
too little data. A latency has a count, and figures for its mean and percentiles in milliseconds. Latencies
include the requests whose intended start is in the window, which begins after the warm-up. Throughput
includes the events in the window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from quire.cli.load import noise
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, ProcessLoad, Record
from quire.cli.load.noise import Floats, Slices
from quire.cli.load.run_spec import Bounds
from quire.cli.load.server_watch import Reading, batch, server_figures

Figures = dict[str, Any]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MAX_POINTS = 60
_MIN_SLICE_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """All data of a run. The window is in seconds from its start."""

    begin_s: float
    end_s: float
    records: Sequence[Record]
    loads: Sequence[ProcessLoad]
    readings: Sequence[Reading] = ()

    @property
    def counted(self) -> list[Record]:
        """The requests whose intended start is in the window."""
        return [record for record in self.records if self.begin_s <= record.intended_s < self.end_s]


def figures(measured: Measured, bounds: Bounds) -> Figures:
    """All figures of a run."""
    slices = Slices(measured.begin_s, measured.end_s)
    counted = measured.counted
    errors = Counter(record.error for record in counted if record.error)
    unfinished, cut_off = errors.pop(UNFINISHED, 0), errors.pop(CUT_OFF, 0)
    return {
        "window_s": measured.end_s - measured.begin_s,
        "requests": {
            "begun": len(counted),
            "done": sum(record.is_done for record in counted),
            "failed": sum(errors.values()),
            "unfinished": unfinished,
            "cut_off": cut_off,
        },
        "errors": dict(errors.most_common()),
        "ttft_ms": latency(_Values.of(counted, _to_first), slices),
        "tbt_ms": latency(_Values.of(counted, _gaps), slices),
        "tpot_ms": latency(_Values.of(counted, _time_per_token), slices),
        "e2e_ms": latency(_Values.of(counted, _whole), slices),
        "throughput": _throughput(measured.records, slices),
        "goodput": _goodput(measured, slices, bounds) if bounds != Bounds() else None,
        "server": server_figures(measured.begin_s, measured.end_s, measured.readings),
        "client": _client(measured),
        "in_flight": {
            name: in_flight(measured.records, at_s)
            for name, at_s in (
                ("middle", (measured.begin_s + measured.end_s) / 2),
                ("end", measured.end_s),
            )
        },
        "series": _series(measured),
    }


@dataclass(frozen=True, slots=True)
class _Values:
    """Durations, and the time of each."""

    at_s: Floats
    values_s: Floats

    @classmethod
    def of(cls, records: Sequence[Record], pairs: Any) -> _Values:
        """`pairs` returns the times and durations of a record."""
        found = list(itertools.chain.from_iterable(pairs(record) for record in records))
        both = np.array(found, dtype=np.float64).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1])


def _to_first(record: Record) -> list[tuple[float, float]]:
    """From the intended start to the first token."""
    return [(record.intended_s, record.times_s[0] - record.intended_s)] if record.times_s else []


def _whole(record: Record) -> list[tuple[float, float]]:
    """From the intended start to the last token."""
    if not record.is_done or record.end_s is None:
        return []
    return [(record.intended_s, record.end_s - record.intended_s)]


def _gaps(record: Record) -> list[tuple[float, float]]:
    """Between two messages that brought tokens."""
    return [(after, after - before) for before, after in itertools.pairwise(record.times_s)]


def _time_per_token(record: Record) -> list[tuple[float, float]]:
    """From the first message to the last, for each token after the first."""
    later = sum(record.counts) - 1
    if not record.is_done or later < 1:
        return []
    return [(record.intended_s, (record.times_s[-1] - record.times_s[0]) / later)]


def latency(values: _Values, slices: Slices) -> Figures:
    """Mean and percentiles in milliseconds."""
    found: Figures = {"count": len(values.values_s)}
    if not found["count"]:
        return found
    # A token that arrives after the window counts for the last slice.
    slice_of = slices.of(values.at_s)
    found["mean"] = _figure(values.values_s.mean(), noise.mean_bounds(values.values_s, slice_of), 1e3)
    for name, quantile in QUANTILES.items():
        bounds = noise.quantile_bounds(values.values_s, slice_of, quantile)
        found[name] = _figure(np.quantile(values.values_s, quantile), bounds, 1e3)
    found["max"] = _figure(values.values_s.max(), unit=1e3)
    return found


def _figure(value: float, bounds: tuple[float, float] | None = None, unit: float = 1.0) -> Figures:
    found = {"value": float(value) * unit}
    if bounds is not None:
        # Histogram classes are coarse: extend the bounds to include the exact value.
        found["low"] = min(bounds[0] * unit, found["value"])
        found["high"] = max(bounds[1] * unit, found["value"])
    return found


def _rate(times_s: Sequence[float | None], slices: Slices, counts: Sequence[int] | None = None) -> Figures:
    """Events per second in the window. `counts` is the weight of each event, 1 by default."""
    at_s = np.array(times_s, dtype=np.float64)
    weights = np.ones(len(at_s)) if counts is None else np.array(counts, dtype=np.float64)
    window_s = slices.end_s - slices.begin_s
    inside = (at_s >= slices.begin_s) & (at_s < slices.end_s)
    if window_s <= 0:
        return _figure(0.0)
    per_slice = np.zeros(noise.SLICES)
    np.add.at(per_slice, slices.of(at_s[inside]), weights[inside])
    bounds = noise.rate_bounds(per_slice, slices.seconds_each)
    return _figure(weights[inside].sum() / window_s, bounds)


def _throughput(records: Sequence[Record], slices: Slices) -> Figures:
    token_s = [at_s for record in records for at_s in record.times_s]
    tokens = [count for record in records for count in record.counts]
    begun = [record for record in records if record.times_s]
    prompts = [record.prompt_tokens for record in begun]
    return {
        "asked_requests_per_s": _rate([record.intended_s for record in records], slices),
        "requests_per_s": _rate([record.end_s for record in records if record.is_done], slices),
        "output_tokens_per_s": _rate(token_s, slices, tokens),
        "prompt_tokens_per_s": _rate([record.times_s[0] for record in begun], slices, prompts),
    }


def is_good(record: Record, bounds: Bounds) -> bool:
    """Whether a request is done and within all bounds, each gap between tokens included."""
    if not record.is_done or not record.times_s:
        return False
    pairs = ((bounds.ttft_ms, _to_first), (bounds.tbt_ms, _gaps), (bounds.tpot_ms, _time_per_token))
    return all(
        1e3 * took_s <= most_ms for most_ms, of in pairs if most_ms is not None for _, took_s in of(record)
    )


def _goodput(measured: Measured, slices: Slices, bounds: Bounds) -> Figures:
    # Requests that end in the window, as for throughput, so that goodput is never higher.
    good_s = [record.end_s for record in measured.records if is_good(record, bounds)]
    # Requests that were cut off are not counted.
    asked = [record for record in measured.counted if record.error != CUT_OFF]
    return dataclasses.asdict(bounds) | {
        "good_requests_per_s": _rate(good_s, slices),
        "share": sum(is_good(record, bounds) for record in asked) / len(asked) if asked else None,
    }


def in_flight(records: Sequence[Record], at_s: float) -> int:
    """The number of requests that should have started and had not ended at a time."""
    return sum(1 for r in records if r.intended_s <= at_s and (r.end_s is None or r.end_s > at_s))


def _client(measured: Measured) -> Figures:
    late_s = [r.sent_s - r.intended_s for r in measured.counted if r.sent_s is not None]
    processes = [{"cpu": load.cpu, "lag_ms": _plain(load.lags_s)} for load in measured.loads]
    return {"lateness_ms": _plain(late_s), "processes": processes}


def _plain(values_s: Sequence[float]) -> Figures:
    if not len(values_s):
        return {"count": 0}
    names = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {"count": len(values_s)} | {n: float(np.quantile(values_s, q)) * 1e3 for n, q in names.items()}


def _series(measured: Measured) -> Figures:
    """Time series, also outside the window. Each list has one entry for each time."""
    records = measured.records
    last_s = max((record.end_s or 0.0 for record in records), default=0.0)
    last_s = max([last_s, measured.end_s, *(reading.at_s for reading in measured.readings)])
    width_s = max(_MIN_SLICE_S, last_s / _MAX_POINTS)
    edges = np.arange(0.0, last_s + width_s, width_s)
    tokens_s = np.array([at for record in records for at in record.times_s], dtype=np.float64)
    tokens = np.array([count for record in records for count in record.counts], dtype=np.float64)
    middles = np.minimum(edges[:-1] + width_s / 2, last_s).tolist()
    client: Figures = {
        "at_s": middles,
        "output_tokens_per_s": (np.histogram(tokens_s, edges, weights=tokens)[0] / width_s).tolist(),
        "in_flight": [in_flight(records, middle) for middle in middles],
    }
    for name, pairs_of in (("ttft_ms", _to_first), ("tbt_ms", _gaps)):
        values = _Values.of(records, pairs_of)
        place = np.digitize(values.at_s, edges) - 1
        for label, quantile in (("p50", 0.5), ("p99", 0.99)):
            client[f"{name}_{label}"] = [
                float(np.quantile(chosen, quantile)) * 1e3 if len(chosen) else None
                for chosen in (values.values_s[place == i] for i in range(len(edges) - 1))
            ]
    pairs = list(itertools.pairwise(measured.readings))
    server: Figures = {
        "at_s": [max(0.0, after.at_s) for _, after in pairs],
        "batch": [batch(before, after) for before, after in pairs],
        "in_flight": [after.in_flight for _, after in pairs],
        "occupancy": [after.occupancy for _, after in pairs],
    }
    return {
        "begin_s": measured.begin_s,
        "end_s": measured.end_s,
        "last_s": last_s,
        "client": client,
        "server": server,
    }
