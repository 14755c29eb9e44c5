"""`tests.gpu.first` itself, rehearsed: what it says of rows that pass, fail, hang or lose their process."""

from __future__ import annotations

import io
import json
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peer_process import PeerFailed
from tests import quire_command
from tests.gpu import sections
from tests.gpu.figures import Device, Figures
from tests.gpu.first import run
from tests.gpu.parts import ROOT, Log, Part, all_parts, run_together
from tests.gpu.report import Report, Row, compare, load
from tests.gpu.sections import Section, all_sections

FAILS = "import pytest\n\ndef test_right(): pass\n\ndef test_wrong(): assert 1 == 2\n"
CRASHES = "import os\n\ndef test_before(): pass\n\ndef test_it(): os.abort()\n"
FIGURES = ("versions", "precompile", "model", "peer", "quantised", "batch-invariant", "ranks", "tiles")
# In each run: the command, and a section of each kind.
ALWAYS = ("versions", "batch-invariant", "tiles")
# With --thorough. The others take half a minute of a core, and test_precompile.py and the tests of quantised
# models run the same code.
REHEARSED = tuple(name for name in FIGURES if name not in ("precompile", "quantised"))


def write(directory: Path, name: str, text: str) -> Part:
    (directory / f"test_{name}.py").write_text(text)
    return Part(name, (str(directory / f"test_{name}.py"),), alone=name == "right")


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are installed here take most of the time that a pytest takes to start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def named(*names: str) -> list[Section]:
    return [section for section in all_sections() if section.name in names]


def test_parts_are_run_and_reported(tmp_path: Path) -> None:
    parts = [write(tmp_path, "right", "def test_it(): pass\n"), write(tmp_path, "wrong", FAILS)]
    parts += [write(tmp_path, "crash", CRASHES), Part("hanging", (), limit_s=0.01)]
    log = io.StringIO()
    outcomes = {one.name: one for one in run_together(parts, Log(log), time.monotonic() + 300, jobs=3)}
    found = {name: (one.state, one.tests, len(one.failures)) for name, one in outcomes.items()}
    told = {"right": ("passed", 1, 0), "wrong": ("failed", 2, 1), "hanging": ("timed out", 0, 0)}
    assert found == {**told, "crash": ("crashed (-6)", 1, 1)}
    assert "crashed" in outcomes["crash"].failures[0] and "test_it" in outcomes["crash"].failures[0]
    assert "Fatal Python error: Aborted" in log.getvalue() and "[wrong] " in log.getvalue()


def test_every_file_is_in_a_part() -> None:
    listed = {file for part in all_parts() for file in part.files}
    assert all((ROOT / file).is_file() for file in listed)
    own = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_*.py")}
    assert own - listed == {"tests/gpu/test_first.py", "tests/gpu/test_shapes.py"}


class KillingReport(Report):
    """Kills the processes that the run has started, once in each section: after its first row."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, "test")
        self.killed: dict[str, int] = {}

    def add(self, row: Row) -> None:
        super().add(row)
        if row.section not in self.killed and row.state == "ok":
            children = [
                child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())
            ]
            self.killed[row.section] = len(children)
            for child in children:
                child.kill()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_figures_go_on_after_a_process_was_killed_in_each_section(tmp_path: Path) -> None:
    report = KillingReport(tmp_path)
    run(named(*FIGURES), report, Log(io.StringIO()), minutes=9, rehearses=True)
    assert report.killed == dict.fromkeys(FIGURES, 1)
    failed = [row for row in report.rows if row.state not in ("ok", "missing")]
    # The row after each kill, which is of the next section where a section has one row.
    assert all(row.state == "failed" and "process has ended" in row.note for row in failed)
    assert len(failed) == len(FIGURES), "one row for each kill"
    assert [row.section for row in report.rows][-1] == FIGURES[-1]


def test_a_part_that_is_killed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [write(tmp_path, "killed", "import os\n\ndef test_it(): os.kill(os.getpid(), 9)\n")]
    parts += [write(tmp_path, "right", "def test_it(): pass\n")]
    monkeypatch.setattr(sections, "other_parts", lambda: parts)
    report = Report(tmp_path, "test")
    run(named("rest"), report, Log(io.StringIO()), minutes=9, rehearses=True)
    assert [(row.name, row.state) for row in report.rows] == [("killed", "crashed"), ("right", "ok")]
    assert report.has_failures


@pytest.fixture(scope="module")
def rehearsed(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The names of the sections that are rehearsed."""
    return REHEARSED if request.config.getoption("--thorough") else ALWAYS


@pytest.fixture(scope="module")
def rehearsal(rehearsed: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their results."""
    out = tmp_path_factory.mktemp("rehearsal")
    only = [argument for name in rehearsed for argument in ("--only", name)]
    command = quire_command.module(
        "tests.gpu.first", "--rehearse", "--out", str(out), "--commit", "abc", *only
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.timeout(600)
def test_every_row_has_figures(rehearsal: Path, rehearsed: tuple[str, ...]) -> None:
    result = load(rehearsal / "gpu.json")
    rows: list[dict[str, Any]] = [row for row in result["rows"] if row["state"] != "missing"]
    assert all(row["state"] == "ok" for row in rows), rows
    sections = [name for name in FIGURES if name in rehearsed]
    assert list(dict.fromkeys(row["section"] for row in rows)) == sections
    timed = [row for row in rows if row["name"].startswith(("decode", "prefill", "transformers"))]
    assert len(timed) > 3 and all(row["figures"]["ms"] > 0 for row in timed)
    assert result["machine"]["commit"] == "abc" and result["machine"]["gpu"] == "no GPU"
    assert "aten::linear" in (rehearsal / "gpu.log").read_text() or "model" not in rehearsed
    assert (rehearsal / "gpu.json").stat().st_size < 1 << 16
    assert "decode, batch 2, device-fed" in (rehearsal / "gpu.md").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_rows_of_the_model_and_its_peer(rehearsal: Path) -> None:
    rows = load(rehearsal / "gpu.json")["rows"]
    decodes = [row for row in rows if row["name"].startswith("decode, batch 1, ")]
    assert len(decodes) == 4 and all(row["figures"]["of bandwidth"] > 0 for row in decodes)
    (profile,) = [row for row in rows if row["name"].startswith("kernels of a step")]
    assert profile["figures"]["kernels"] > 10 and "gaps us" in profile["figures"]
    table = (rehearsal / "gpu.md").read_text()
    assert "decode, batch 2, launched ahead" in table and "transformers, graph, batch 2" in table


def test_two_results_are_compared(rehearsal: Path, tmp_path: Path) -> None:
    result = load(rehearsal / "gpu.json")
    assert [line for line in compare(result, result).splitlines() if line.startswith("|")][2:] == []
    (of_tiles, *_) = [row["name"] for row in result["rows"] if row["section"] == "tiles"]
    (slower, *_) = [row for row in result["rows"] if row["name"] == "decode, batch 2, device-fed"]
    slower["figures"]["ms"] *= 2
    result["rows"] = [row for row in result["rows"] if row["section"] != "tiles"]
    (tmp_path / "old.json").write_text(json.dumps(result))
    command = quire_command.module(
        "tests.gpu.first", "--compare", str(tmp_path / "old.json"), "--out", str(rehearsal)
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "decode, batch 2, device-fed: ms" in done.stdout and "0.50x" in done.stdout
    assert f"| tiles | {of_tiles} | - | ok | |" in done.stdout


def test_what_is_no_result_is_not_compared(tmp_path: Path) -> None:
    for text in ("", "[]", '{"format": "other"}'):
        (tmp_path / "gpu.json").write_text(text)
        with pytest.raises(ValueError, match=r"gpu\.json"):
            load(tmp_path / "gpu.json")


def test_rows_for_which_no_time_is_left_are_skipped(tmp_path: Path) -> None:
    report = Report(tmp_path, "test")
    run(named("model", "rest"), report, Log(io.StringIO()), minutes=0, rehearses=True)
    assert report.rows and {row.state for row in report.rows} == {"skipped"}
    assert not report.has_failures


@pytest.mark.thorough  # It takes two processes with all imports.
def test_a_hanging_call_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows has a new process."""
    monkeypatch.setattr("tests.gpu.figures._GRACE_S", 0.5)
    device = Device("rehearsal", Log(io.StringIO()), rehearses=True)
    figures = Figures(device, "model", time.monotonic() + 60, turns=1)
    assert figures.call("first", "versions")[0].state == "ok"
    short = Figures(device, "model", time.monotonic() + 0.1, turns=1)
    row, _ = short.call("hangs", "kernel", kernel="decode_attention", shape_name="qwen3-8b", size=[2, 32_768])
    assert row.state == "timed out" and "no answer to kernel" in row.note
    assert figures.call("after", "versions")[0].state == "ok"
    device.close()


def test_what_cannot_be_loaded_does_not_take_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()

    class Unable:
        broken = ""

        def __init__(self, *_: object) -> None:
            pass

        def call(self, method: str, **_: object) -> str:
            called.append(method)
            if method == "load":
                raise PeerFailed("there is no memory")
            return method

        def close(self) -> None:
            pass

    monkeypatch.setattr("tests.gpu.figures.PeerProcess", Unable)
    figures = Figures(Device("rehearsal", Log(io.StringIO()), rehearses=True), "model", math.inf, turns=1)
    figures.device.prepare_with("load")
    rows = [figures.call("decode", "decode")[0] for _ in range(4)]
    assert [row.note for row in rows] == ["there is no memory"] * 2 + ["load has failed"] * 2
    figures.device.prepare_with("release")
    assert figures.call("decode", "decode")[1] == "decode"
    assert called == ["load", "load", "release", "decode"]


def test_a_fault_of_a_section_is_a_row(tmp_path: Path) -> None:
    def fail(_context: object, _end_s: float) -> Iterator[Row]:
        yield Row("broken", "before")
        raise KeyError("planted")

    report = Report(tmp_path, "test")
    run([Section("broken", 10, fail)], report, Log(io.StringIO()), minutes=1, rehearses=True)
    assert [(row.name, row.state) for row in report.rows] == [("before", "ok"), ("the section", "failed")]


def test_without_a_device_nothing_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = quire_command.module("tests.gpu.first", "--out", str(tmp_path / "out"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--rehearse" in done.stderr and not (tmp_path / "out").exists()
