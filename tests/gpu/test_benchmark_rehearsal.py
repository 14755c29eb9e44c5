"""The GPU benchmark, small and on the CPU, without what only the gateway needs: every row has figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What the lent machine does not have.
# Not psutil: transformers looks whether there is such a file, and imports it then.
ABSENT = ("structlog", "grpc", "quire", "hypothesis", "rich")


def rehearse(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result and its tables. Modules of these names, found first, cannot be imported, in no process."""
    absent = out / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    command = [sys.executable, "-m", "benchmarks.run", "--rehearse", "--out", str(out), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(absent), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = out.glob("*.json")
    return json.loads(written.read_text()), written.with_suffix(".md").read_text()


def test_every_row_has_figures(tmp_path: Path) -> None:
    result, text = rehearse(tmp_path, "--commit", "abc")
    names = [workload["name"] for workload in result["workloads"]]
    families = ["rehearsal-experts", "rehearsal-windows"]
    assert names == ["rehearsal", "attention", "workload", "rows", "sampling", "peer", *families]
    figures = [figure for workload in result["workloads"] for figure in workload["figures"]]
    assert all("problem" not in figure and figure["ms"]["p50"] > 0 for figure in figures), text
    assert all(ratio["ratio"] for workload in result["workloads"] for ratio in workload["ratios"]), text
    assert result["suite"] == "rehearsal" and result["machine"]["commit"] == "abc"
    more = result["workloads"][2]["figures"][0]["more"]
    assert more["output tokens"] >= 9 and more["decode steps"] > 0
    assert "decode, batch 2, device-fed" in text and "transformers, graph, batch 2" in text


def test_rows_for_which_no_time_is_left_are_reported(tmp_path: Path) -> None:
    result, text = rehearse(tmp_path, "--minutes", "0", "--rows", "rows,sampling")
    problems = {workload["name"]: workload["problem"] for workload in result["workloads"]}
    assert problems == dict.fromkeys(("rows", "sampling"), "skipped: no time was left")
    assert text.count("skipped: no time was left") == 2
