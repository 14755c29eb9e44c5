"""Every kernel compiles for the GPUs it is shipped for, without spills and with its loads pipelined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kernels.cuda.compile_gate import Report

ROOT = Path(__file__).parents[3]


def compile_gate(where: str) -> list[Report]:
    """The reports of the gate, run in a process without TRITON_INTERPRET."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    # Kept between runs: Triton takes from it only what the same compiler made of the same source.
    cache = Path(tempfile.gettempdir()) / f"quire-compile-gate-{os.getuid()}"
    environment.setdefault("TRITON_CACHE_DIR", str(cache))
    command = [sys.executable, "-m", "tests.kernels.cuda.compile_gate", where]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert outcome.returncode == 0, outcome.stderr
    return [Report(**json.loads(line)) for line in outcome.stdout.splitlines()]


def table(reports: list[Report]) -> str:
    """What was compiled to what, for people."""
    lines = [f"{'configuration':56} sm  registers  stack  shared  buffers  wgmma"]
    lines += [
        f"{report.name:56} {report.architecture} {report.registers:10} {report.stack_bytes:6} "
        f"{report.shared_bytes:7} {report.buffers:8}  {'yes' if report.wgmma else ''}"
        for report in reports
    ]
    return "\n".join(lines)


@pytest.mark.timeout(600)
def test_kernels_compile_as_intended() -> None:
    reports = compile_gate("kernels.cuda")
    sys.stdout.write(table(reports) + "\n")
    assert len({(report.name, report.architecture) for report in reports}) == len(reports), "names repeat"
    faulty = [
        f"{report.name} sm_{report.architecture}: {', '.join(report.faults)}"
        for report in reports
        if report.faults
    ]
    assert not faulty, "\n".join(faulty)


def test_faults_are_found() -> None:
    found = {
        report.name: " ".join(report.faults)
        for report in compile_gate("tests.kernels.cuda.compile_gate_controls")
    }
    expected = {
        "well": "",
        "one buffer": "has a tile with 1 of 2 buffers",
        "no wgmma": "does not use wgmma",
        "too much shared memory": "bytes of shared memory of 1024",
        "spills": "spills",
        "signature": "signature has",
        "does not compile": "does not compile: ",
    }
    assert found.keys() == expected.keys()
    for name, fault in expected.items():
        assert fault in found[name], name
    assert found["well"] == ""
