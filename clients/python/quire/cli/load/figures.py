"""Computes the figures of a run from its records, as plain data for a JSON file.

A latency has a count, and its mean and percentiles in milliseconds. Latencies include the requests whose
intended start is in the window, which begins after the warm-up. Throughput includes the events in the window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, ProcessLoad, Record
from quire.cli.load.run_spec import Bounds
from quire.cli.load.server_watch import Reading, batch, server_figures

Figures: TypeAlias = dict[str, Any]
# Durations of a record in seconds, each with its time.
_Durations: TypeAlias = Callable[[Record], list[tuple[float, float]]]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
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

    def rate(self, events: Iterable[tuple[float | None, int]]) -> float:
        """Events per second in the window, each with its time and its weight."""
        window_s = self.end_s - self.begin_s
        found = sum(n for at_s, n in events if at_s is not None and self.begin_s <= at_s < self.end_s)
        return found / window_s if window_s > 0 else 0.0


def figures(measured: Measured, bounds: Bounds) -> Figures:
    """All figures of a run."""
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
        "ttft_ms": _latency_of(counted, _to_first),
        "tbt_ms": _latency_of(counted, _gaps),
        "tpot_ms": _latency_of(counted, _time_per_token),
        "e2e_ms": _latency_of(counted, _whole),
        "throughput": _throughput(measured),
        "goodput": _goodput(measured, bounds) if bounds != Bounds() else None,
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


def _latency_of(records: Sequence[Record], durations: _Durations) -> Figures:
    return latency([took_s for record in records for _, took_s in durations(record)])


def latency(values_s: Sequence[float]) -> Figures:
    """The count, the mean and percentiles in milliseconds."""
    if not len(values_s):
        return {"count": 0}
    values_ms = np.array(values_s, dtype=np.float64) * 1e3
    quantiles = {name: float(np.quantile(values_ms, quantile)) for name, quantile in _QUANTILES.items()}
    return {
        "count": len(values_ms),
        "mean": float(values_ms.mean()),
        **quantiles,
        "max": float(values_ms.max()),
    }


def _throughput(measured: Measured) -> Figures:
    records = measured.records
    begun = [record for record in records if record.times_s]
    return {
        "asked_requests_per_s": measured.rate((r.intended_s, 1) for r in records),
        "requests_per_s": measured.rate((r.end_s, 1) for r in records if r.is_done),
        "output_tokens_per_s": measured.rate(
            message for r in records for message in zip(r.times_s, r.counts, strict=True)
        ),
        "prompt_tokens_per_s": measured.rate((r.times_s[0], r.prompt_tokens) for r in begun),
    }


def is_good(record: Record, bounds: Bounds) -> bool:
    """Whether a request is done and within all bounds, each gap between tokens included."""
    if not record.is_done or not record.times_s:
        return False
    pairs = ((bounds.ttft_ms, _to_first), (bounds.tbt_ms, _gaps), (bounds.tpot_ms, _time_per_token))
    return all(
        1e3 * took_s <= most_ms for most_ms, of in pairs if most_ms is not None for _, took_s in of(record)
    )


def _goodput(measured: Measured, bounds: Bounds) -> Figures:
    # Requests that were cut off are not counted.
    asked = [record for record in measured.counted if record.error != CUT_OFF]
    return dataclasses.asdict(bounds) | {
        # Requests that end in the window, as for throughput, so that goodput is never higher.
        "good_requests_per_s": measured.rate((r.end_s, 1) for r in measured.records if is_good(r, bounds)),
        "share": sum(is_good(record, bounds) for record in asked) / len(asked) if asked else None,
    }


def in_flight(records: Sequence[Record], at_s: float) -> int:
    """The number of requests that should have started and had not ended at a time."""
    return sum(1 for r in records if r.intended_s <= at_s and (r.end_s is None or r.end_s > at_s))


def _client(measured: Measured) -> Figures:
    late_s = [r.sent_s - r.intended_s for r in measured.counted if r.sent_s is not None]
    processes = [{"cpu": load.cpu, "lag_ms": latency(load.lags_s)} for load in measured.loads]
    return {"lateness_ms": latency(late_s), "processes": processes}


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
    for name, durations in (("ttft_ms", _to_first), ("tbt_ms", _gaps)):
        of_slices: list[list[float]] = [[] for _ in middles]
        for at_s, took_s in itertools.chain.from_iterable(map(durations, records)):
            of_slices[min(int(at_s / width_s), len(middles) - 1)].append(took_s)
        for label in ("p50", "p99"):
            client[f"{name}_{label}"] = [latency(values_s).get(label) for values_s in of_slices]
    pairs = list(itertools.pairwise(measured.readings))
    server: Figures = {
        "at_s": [max(0.0, after.at_s) for _, after in pairs],
        "batch": [batch(before, after) for before, after in pairs],
        "in_flight": [after.status.operations_in_flight for _, after in pairs],
        "occupancy": [after.occupancy for _, after in pairs],
    }
    return {
        "begin_s": measured.begin_s,
        "end_s": measured.end_s,
        "last_s": last_s,
        "client": client,
        "server": server,
    }
