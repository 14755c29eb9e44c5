"""Figures against what a plain computation says, and how they are told and shown."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.cli.load.figures import Measured, figures
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, ProcessLoad, Record
from quire.cli.load.report import page
from quire.cli.load.run_spec import Bounds
from quire.cli.load.server_watch import Reading
from quire.cli.load.verdict import remarks
from quire.v1 import executor_pb2, types_pb2

BEGIN_S, END_S = 2.0, 12.0
# A hundred requests each. With --thorough as many as of others.
FEW_EXAMPLES = settings(max_examples=settings().max_examples // 2)


def record_of(draws: random.Random, index: int) -> Record:
    """One that was meant to start within 14 seconds, and ended somehow."""
    record = Record(index, draws.randint(1, 50), draws.uniform(0, 14))
    record.sent_s = at_s = record.intended_s + draws.expovariate(1000)
    for _ in range(draws.randint(0, 6)):
        at_s += draws.expovariate(20)
        record.times_s.append(at_s)
        record.counts.append(draws.choice([1, 1, 2]))
    record.end_s = at_s
    if not record.counts or draws.random() < 0.2:
        record.error = draws.choice(["OVERLOADED", "QUEUE_FULL", UNFINISHED, CUT_OFF])
    return record


def plain_quantile(values: list[float], quantile: float) -> float:
    """With what lies between two values on the straight line between them."""
    ordered = sorted(values)
    place = quantile * (len(ordered) - 1)
    below, part = ordered[math.floor(place)], place - math.floor(place)
    return below + part * (ordered[math.ceil(place)] - below)


@FEW_EXAMPLES
@given(seed=st.integers(0, 10**6), count=st.integers(1, 120))
def test_figures_are_those_of_a_plain_computation(seed: int, count: int) -> None:
    draws = random.Random(seed)
    records = [record_of(draws, index) for index in range(count)]
    bounds = Bounds(ttft_ms=50, tbt_ms=90, tpot_ms=60)
    found = figures(Measured(BEGIN_S, END_S, records, [ProcessLoad()]), bounds)
    counted = [record for record in records if BEGIN_S <= record.intended_s < END_S]

    ttfts = [r.times_s[0] - r.intended_s for r in counted if r.times_s]
    gaps = [b - a for r in counted for a, b in itertools.pairwise(r.times_s)]
    wholes = [(r.end_s or 0) - r.intended_s for r in counted if not r.error]
    means = {
        r.index: (r.times_s[-1] - r.times_s[0]) / (sum(r.counts) - 1)
        for r in records
        if not r.error and sum(r.counts) > 1
    }
    for name, values in (
        ("ttft_ms", ttfts),
        ("tbt_ms", gaps),
        ("e2e_ms", wholes),
        ("tpot_ms", [means[r.index] for r in counted if r.index in means]),
    ):
        assert found[name]["count"] == len(values)
        if values:
            assert found[name]["mean"] == pytest.approx(1e3 * statistics.fmean(values))
            assert found[name]["max"] == pytest.approx(1e3 * max(values))
            for p, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                assert found[name][p] == pytest.approx(1e3 * plain_quantile(values, quantile))

    rates = found["throughput"]
    window_s = END_S - BEGIN_S
    done = sum(not r.error and BEGIN_S <= (r.end_s or 0) < END_S for r in records)
    tokens = sum(
        n for r in records for at, n in zip(r.times_s, r.counts, strict=True) if BEGIN_S <= at < END_S
    )
    assert rates["requests_per_s"] == pytest.approx(done / window_s)
    assert rates["output_tokens_per_s"] == pytest.approx(tokens / window_s)
    assert rates["asked_requests_per_s"] == pytest.approx(len(counted) / window_s)

    good = [
        r
        for r in records
        if not r.error
        and r.times_s[0] - r.intended_s <= 0.05
        and all(b - a <= 0.09 for a, b in itertools.pairwise(r.times_s))
        and means.get(r.index, 0) <= 0.06
    ]
    ended = sum(BEGIN_S <= (r.end_s or 0) < END_S for r in good)
    assert found["goodput"]["good_requests_per_s"] == pytest.approx(ended / window_s)
    asked = [r for r in counted if r.error != CUT_OFF]
    if asked:
        assert found["goodput"]["share"] == pytest.approx(sum(r in good for r in counted) / len(asked))

    requests = found["requests"]
    assert requests["begun"] == len(counted)
    assert requests["begun"] == sum(v for k, v in requests.items() if k != "begun")
    assert sum(found["errors"].values()) == requests["failed"]
    assert {UNFINISHED, CUT_OFF}.isdisjoint(found["errors"])


def reading(at_s: float, steps: int, items: int, epoch: int = 1, used: int = 25) -> Reading:
    status = executor_pb2.GetStatusResponse(operations_in_flight=3, refusals={"OVERLOADED": int(at_s)})
    worker = status.workers.add(worker_id="w", epoch=epoch)
    worker.counts.MergeFrom(types_pb2.StepCounts(steps=steps, batch_items=items, step_tokens=2 * items))
    worker.pool.MergeFrom(types_pb2.PoolUsage(pages_referenced=used, pages_total=100))
    return Reading(at_s, status, machine_cpu=0.5)


def test_the_servers_figures_are_differences_of_its_counters() -> None:
    readings = [
        reading(1, 100, 100),
        reading(3, 150, 300, used=50),
        reading(5, 250, 500),
        # Another process counts from 0 again.
        reading(7, 10, 10, epoch=2),
        reading(9, 60, 60, epoch=2, used=75),
        reading(13, 999, 999_999, epoch=2),
    ]
    measured = Measured(2, 8, [Record(0, 1, 3.0)], [ProcessLoad()], readings)
    server = figures(measured, Bounds())["server"]
    assert server["steps"] == 50 + 100 + 50
    assert server["mean_batch"] == pytest.approx((200 + 200 + 50) / 200)
    assert server["largest_batch"] == 4
    assert server["occupancy_max"] == 0.75
    assert server["refusals"] == {"OVERLOADED": 8}
    assert server["workers_replaced"] == 1


def test_a_run_without_anything_has_figures_too() -> None:
    found = figures(Measured(0, 10, [], [ProcessLoad()]), Bounds(1000, 1000))
    assert found["ttft_ms"] == {"count": 0}
    assert found["goodput"]["share"] is None
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=True)
    assert [remark.who for remark in said] == ["note"]
    assert "nothing was measured" in page(document(found))


def test_a_busy_client_process_is_named() -> None:
    load = ProcessLoad(array("d", [0.001] * 90 + [0.5] * 10), cpu=0.97)
    found = figures(Measured(0, 10, steady(1), [load]), Bounds())
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=True)
    assert said[0].who == "client"
    assert "97% of a core" in said[0].text and "late by itself" in said[0].text


def steady(seed: int) -> list[Record]:
    """Requests of some 10 ms to the first token and 5 ms between tokens."""
    draws = random.Random(seed)
    records = []
    for index in range(1000):
        record = Record(index, 10, index / 100)
        record.sent_s = at_s = record.intended_s
        for mean_s in (0.01, 0.005, 0.005):
            at_s += mean_s * draws.lognormvariate(0, 0.3)
            record.times_s.append(at_s)
            record.counts.append(1)
        record.end_s = at_s
        records.append(record)
    return records


def document(run: dict[str, Any], **about: Any) -> dict[str, Any]:
    known = {
        "taken_at": "2030-01-01T00:00:00+00:00", "target": "here", "model": "m", "dtype": "float32",
        "device": "cpu", "server_version": "1", "client": "c", "mode": "unary", "batch": 1, "processes": 1,
        "seed": 0, "prompt_tokens": "10", "output_tokens": "3", "shared_prefix_tokens": "0",
        "shared_prefixes": 1, "max_lateness_ms": 10.0,
    }  # fmt: skip
    pace = {"rate": 100.0, "arrivals": "poisson", "callers": None}
    whole = {"pace": pace, "interrupted": False, "remarks": []} | run
    return {"format": "quire-load-1", "about": known | about, "runs": [whole]}


def test_the_page_escapes_what_it_names_and_needs_nothing_else() -> None:
    found = figures(Measured(0, 10, steady(1), [ProcessLoad()]), Bounds())
    text = page(document(found, model="<script>alert(1)</script>"))
    assert text.count("<svg") == text.count("</svg>") >= 4
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search("src=|href=", text) and "nan" not in text.lower()
