"""The benchmarks' own code: what is skipped for want of time, and which results the pages show."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import machine, schedule, tables
from benchmarks.peers.base import Sample
from benchmarks.plan import Comparison, Entry, Workload, select
from benchmarks.report import performance_block
from benchmarks.results import name_of
from benchmarks.schedule import WorkloadRun
from benchmarks.shapes import SHAPES
from benchmarks.workloads import LLAMA_CPP, QUANTISED, SERVICE, all_workloads


def test_pages_show_the_results() -> None:
    for path, page in tables.pages(tables.results()).items():
        assert path.read_text("utf-8") == page, "python -m benchmarks.tables writes it"


def test_one_result_for_each_kind_of_cpu() -> None:
    """A full run writes to a name without a date, which git keeps the history of."""
    for path, result in tables.results().items():
        assert path.stem == name_of(result)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["avx2"], "amd-epyc-avx2-2-cores"),
        (["avx2", "avx512f"], "amd-epyc-avx512-2-cores"),
        (["avx2", "avx512f", "avx512_bf16"], "amd-epyc-avx512bf16-2-cores"),
        (["avx2", "avx512f", "avx512_bf16", "amx_bf16"], "amd-epyc-amx-2-cores"),
        ([], "amd-epyc-2-cores"),
    ],
)
def test_cpus_of_one_name_have_results_of_their_own(flags: list[str], name: str) -> None:
    assert machine.slug({"cpu": "AMD EPYC", "cores": 2, "flags": flags}) == name


def test_quantised_rows_compare_two_that_read_the_same_file() -> None:
    rows = select(all_workloads(SHAPES["tiny"]), [QUANTISED])
    assert len(rows) == 12 and not {row.name for row in rows} & {w.name for w in select(rows, [])}
    for row in rows:
        form = row.name.rpartition("-")[2]
        assert {entry.label: entry.peer for entry in row.entries} == {
            LLAMA_CPP: f"llama.cpp {form}",
            SERVICE: f"service {form}",
        }


def test_a_report_on_quantised_rows_says_what_a_worker_holds_more_than_it_must() -> None:
    result = next(iter(tables.results().values()))
    figures = [{"label": SERVICE, "ms": {"p10": 1, "p50": 2, "p90": 3}}]
    result |= {
        "group": QUANTISED,
        "workloads": [{"name": "w", "title": "w", "unit": "step", "figures": figures, "ratios": []}],
        "memory": {
            "service q4_0: gateway": 60e6,
            "service q4_0: worker": 460e6,
            "service q8_0: worker": 600e6,
        },
        "held": {"service q4_0: worker": 400e6, "service q8_0: worker": 500e6},
    }
    lines = performance_block(result, "results/w.json").splitlines()
    assert "| service q4_0: gateway | 60 |  |  |  |  |" in lines
    assert "| service q4_0: worker | 460 | 400 | 1.15 | 1.15 | reached |" in lines
    assert "| service q8_0: worker | 600 | 500 | 1.20 | 1.15 | not reached |" in lines


class Clock:
    """Time that passes only while a peer measures."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Peer:
    """One whose turns take a fixed time for each sequence of a batch."""

    def __init__(self, clock: Clock, turn_s: float) -> None:
        self._clock, self._turn_s = clock, turn_s

    def call(self, _method: str, **_arguments: object) -> None:
        pass

    def measure(self, _method: str, *, batch: int, **_arguments: object) -> dict[str, Sample]:
        self._clock.now_s += self._turn_s * batch
        return {"": Sample([1], 1)}


def race(
    monkeypatch: pytest.MonkeyPatch, turns_s: dict[str, float], seconds: float
) -> tuple[dict[str, Any], float]:
    """A workload of batches of eight: its figures by label, and how long it took."""
    clock = Clock()
    monkeypatch.setattr(schedule, "time", clock)
    peers: Any = {name: Peer(clock, turn_s / 8) for name, turn_s in turns_s.items()}
    workload = Workload(
        name="w",
        title="w",
        unit="step",
        entries=[Entry(name, name, "prefill", {"batch": 8}) for name in turns_s],
        comparisons=[Comparison("fast", "slow")],
        warm={"batch": 1},
        turn_over_warm=8,
        rounds=(3, 20),
    )
    run = WorkloadRun(workload, peers.__getitem__, lambda _: None)
    run.run(seconds)
    return {figure["label"]: figure for figure in run.result({})["figures"]}, clock.now_s


def test_who_is_too_slow_for_the_time_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found, took_s = race(monkeypatch, {"slow": 200, "fast": 20}, 100)
    assert found["slow"]["problem"] == "skipped: a turn takes about 200 s" and not found["slow"]["failed"]
    # 27.5 s for the first turns, which do not count; then three rounds of 20 s fit.
    assert found["fast"]["rounds"] == 3 and took_s == 27.5 + 3 * 20


def test_who_fits_once_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, took_s = race(monkeypatch, {"slow": 60, "fast": 2}, 80)
    # After 7.75 s and a first round of 62 s there are 10.25 s left: for the fast one, five times.
    assert (found["slow"]["rounds"], found["fast"]["rounds"]) == (1, 6)
    assert took_s == 7.75 + 62 + 10


def test_short_turns_have_their_rounds_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = race(monkeypatch, {"slow": 9, "fast": 1}, 0)
    assert found["slow"]["rounds"] == found["fast"]["rounds"] == 3
