"""Figures against what a plain computation says, their noise and comparisons."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.cli.load.compare import changes
from quire.cli.load.figures import Measured, figures
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, ProcessLoad, Record
from quire.cli.load.run_spec import Bounds
from quire.cli.load.server_watch import Reading
from quire.cli.load.verdict import remarks
from quire.cli.main import main
from quire.v1 import executor_pb2, types_pb2

BEGIN_S, END_S = 2.0, 12.0
# A hundred requests each. With --thorough as many as of others.
FEW_EXAMPLES = settings(max_examples=16) if settings().max_examples == 50 else settings()


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
            assert found[name]["mean"]["value"] == pytest.approx(1e3 * statistics.fmean(values))
            assert found[name]["max"]["value"] == pytest.approx(1e3 * max(values))
            for p, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                figure = found[name][p]
                assert figure["value"] == pytest.approx(1e3 * plain_quantile(values, quantile))
                assert figure.get("low", 0) <= figure["value"] <= figure.get("high", math.inf)

    rates = found["throughput"]
    window_s = END_S - BEGIN_S
    done = sum(not r.error and BEGIN_S <= (r.end_s or 0) < END_S for r in records)
    tokens = sum(
        n for r in records for at, n in zip(r.times_s, r.counts, strict=True) if BEGIN_S <= at < END_S
    )
    assert rates["requests_per_s"]["value"] == pytest.approx(done / window_s)
    assert rates["output_tokens_per_s"]["value"] == pytest.approx(tokens / window_s)
    assert rates["asked_requests_per_s"]["value"] == pytest.approx(len(counted) / window_s)

    good = [
        r
        for r in records
        if not r.error
        and r.times_s[0] - r.intended_s <= 0.05
        and all(b - a <= 0.09 for a, b in itertools.pairwise(r.times_s))
        and means.get(r.index, 0) <= 0.06
    ]
    ended = sum(BEGIN_S <= (r.end_s or 0) < END_S for r in good)
    assert found["goodput"]["good_requests_per_s"]["value"] == pytest.approx(ended / window_s)
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
    return Reading.of(status, at_s, machine_cpu=0.5)


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


def test_a_busy_client_process_is_named() -> None:
    load = ProcessLoad(array("d", [0.001] * 90 + [0.5] * 10), cpu=0.97)
    found = figures(Measured(0, 10, steady(1), [load]), Bounds())
    said = remarks(found, max_lateness_ms=10, is_open=True, is_local=True)
    assert said[0].who == "client"
    assert "97% of a core" in said[0].text and "late by itself" in said[0].text


def steady(seed: int, slower: float = 1.0) -> list[Record]:
    """Requests of some 10 ms to the first token and 5 ms between tokens."""
    draws = random.Random(seed)
    records = []
    for index in range(1000):
        record = Record(index, 10, index / 100)
        record.sent_s = at_s = record.intended_s
        for mean_s in (0.01, 0.005, 0.005):
            at_s += slower * mean_s * draws.lognormvariate(0, 0.3)
            record.times_s.append(at_s)
            record.counts.append(1)
        record.end_s = at_s
        records.append(record)
    return records


def run_of(seed: int, slower: float = 1.0) -> dict[str, Any]:
    found = figures(Measured(0, 10, steady(seed, slower), [ProcessLoad()]), Bounds())
    pace = {"rate": 100.0, "arrivals": "poisson", "callers": None}
    return {"pace": pace, "interrupted": False, "remarks": []} | found


def document(*runs: dict[str, Any], **about: Any) -> dict[str, Any]:
    known = {
        "taken_at": "2030-01-01T00:00:00+00:00", "target": "here", "model": "m", "dtype": "float32",
        "device": "cpu", "server_version": "1", "client": "c", "mode": "unary", "batch": 1, "processes": 1,
        "seed": 0, "prompt_tokens": "10", "output_tokens": "3", "shared_prefix_tokens": "0",
        "shared_prefixes": 1, "max_lateness_ms": 10.0,
    }  # fmt: skip
    pace = {"rate": 100.0, "arrivals": "poisson", "callers": None}
    whole = [{"pace": pace, "interrupted": False, "remarks": []} | run for run in runs]
    return {"format": "quire-load-1", "about": known | about, "runs": whole}


@pytest.mark.parametrize(("number", "least"), [(9, 8), pytest.param(18, 15, marks=pytest.mark.thorough)])
def test_bounds_hold_what_they_promise(number: int, least: int) -> None:
    """Of many runs that differ by chance alone, nearly all medians lie between the bounds of one of them."""
    runs = [run_of(seed) for seed in range(number)]
    medians = [run["ttft_ms"]["p50"]["value"] for run in runs]
    truth = statistics.fmean(medians)
    covered = sum(run["ttft_ms"]["p50"]["low"] <= truth <= run["ttft_ms"]["p50"]["high"] for run in runs)
    # 95% in theory; the draws are always the same ones.
    assert covered >= least
    assert all(run["ttft_ms"]["p50"]["high"] / run["ttft_ms"]["p50"]["low"] < 1.2 for run in runs)


def test_a_comparison_tells_a_change_from_noise() -> None:
    verdicts = {one.name: one.verdict for one in changes(run_of(1), run_of(2))}
    assert set(verdicts.values()) == {"noise"}
    slower = {one.name: one for one in changes(run_of(1), run_of(2, slower=1.5))}
    for name, one in slower.items():
        if "ms" in name:
            assert one.verdict == "worse", name
            assert one.low is not None and one.high is not None
            assert one.low <= 1.5 * 1.1 and one.high >= 1.5 / 1.1
    assert slower["requests/s"].verdict == "noise"
    faster = {one.name: one.verdict for one in changes(run_of(1, slower=1.5), run_of(2))}
    assert faster["to first token p50, ms"] == "better"


def test_the_command_compares_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(document(run_of(1))))
    second.write_text(json.dumps(document(run_of(2, slower=2.0), prompt_tokens="99")))
    assert main(["load", "--compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "They differ in prompt_tokens: 10 and 99." in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["to first token p50, ms"].rstrip().endswith("worse")
    assert lines["requests/s"].rstrip().endswith("noise")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}'])
def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert main(["load", "--compare", str(path), str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["load", "--compare", str(path), str(tmp_path / "none")]) == 2
