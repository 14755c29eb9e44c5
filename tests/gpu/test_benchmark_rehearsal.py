"""The GPU benchmark, small and on the CPU, without what only the gateway needs: every part has figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the lent machine does not have.
ABSENT = ("structlog", "grpc", "google.protobuf", "quire", "pytest")
RUN = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); from benchmarks.gpu.run import main; "


def rehearse(out: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-c", RUN + "sys.exit(main())", "--rehearse", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def test_every_part_has_figures(tmp_path: Path) -> None:
    status, output = rehearse(tmp_path, "--commit", "abc")
    assert status == 0, output
    result = json.loads((tmp_path / "gpu-bench.json").read_text())
    names = [part["name"] for part in result["parts"]]
    assert names == ["machine", "tiny", "attention", "workload", "rows", "sampling", "peer"]
    assert all(part["rows"] and "problem" not in part for part in result["parts"]), output
    assert result["rehearsal"] and result["machine"]["commit"] == "abc"
    workload = next(part for part in result["parts"] if part["name"] == "workload")["rows"][0]["figures"]
    assert workload["output_tokens"] >= 9 and workload["decode_only_steps"] > 0
    text = (tmp_path / "gpu-bench.md").read_text()
    assert "| goal |" in text and "decode, batch 2" in text and "transformers, graph" in text


def test_parts_for_which_no_time_is_left_are_reported(tmp_path: Path) -> None:
    status, output = rehearse(tmp_path, "--minutes", "0", "--parts", "rows")
    assert status == 0, output
    result = json.loads((tmp_path / "gpu-bench.json").read_text())
    assert [(part["name"], part["problem"]) for part in result["parts"]] == [
        ("machine", "skipped: no time was left"),
        ("rows", "skipped: no time was left"),
    ]
