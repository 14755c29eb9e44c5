"""The driver of `make gpu-test`: what it starts, and what it says of parts that pass, fail or are skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.run import ROOT, Part, all_parts, run_all

FAILS = "import pytest\n\ndef test_right(): pass\n\ndef test_wrong(): assert 1 == 2\n"
CRASHES = "import os\n\ndef test_before(): pass\n\ndef test_it(): os.abort()\n"


def write(directory: Path, name: str, text: str) -> Part:
    (directory / f"test_{name}.py").write_text(text)
    return Part(name, (str(directory / f"test_{name}.py"),), alone=name == "right")


def test_parts_are_run_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those that are installed here take most of the time that a pytest takes to start.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    parts = [write(tmp_path, "right", "def test_it(): pass\n"), write(tmp_path, "wrong", FAILS)]
    parts += [write(tmp_path, "crash", CRASHES), Part("hanging", (), limit_s=0.01)]
    assert not run_all(parts, tmp_path / "out", jobs=3, minutes=5, commit="abc")
    result = json.loads((tmp_path / "out" / "gpu-test.json").read_text())
    found = {part["name"]: (part["state"], part["tests"], len(part["failures"])) for part in result["parts"]}
    told = {"right": ("passed", 1, 0), "wrong": ("failed", 2, 1), "hanging": ("timed out", 0, 0)}
    assert found == {**told, "crash": ("crashed (-6)", 1, 1)}
    crash = next(part for part in result["parts"] if part["name"] == "crash")
    assert "crashed" in crash["failures"][0] and "test_it" in crash["failures"][0]
    log = (tmp_path / "out" / "gpu-test.log").read_text()
    assert "Fatal Python error: Aborted" in log and "[wrong] " in log
    assert result["machine"]["commit"] == "abc"
    text = (tmp_path / "out" / "gpu-test.md").read_text()
    assert "| right | passed | 1 | 0 | 0 |" in text and "test_wrong: assert 1 == 2" in text


def test_parts_for_which_no_time_is_left_are_reported(tmp_path: Path) -> None:
    assert run_all([Part("late", ("nowhere",))], tmp_path, jobs=1, minutes=0, commit=None)
    result = json.loads((tmp_path / "gpu-test.json").read_text())
    assert [(part["name"], part["state"]) for part in result["parts"]] == [("late", "skipped")]


def test_every_file_is_in_a_part() -> None:
    listed = {file for part in all_parts() for file in part.files}
    assert all((ROOT / file).is_file() for file in listed)
    own = {str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("test_*.py")}
    # Those test the drivers, on any machine.
    assert own - listed == {"tests/gpu/test_benchmark_rehearsal.py", "tests/gpu/test_gpu_test_run.py"}
