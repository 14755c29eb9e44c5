"""Gateway, callers and workers on hosts of their own: faults of hosts and links between them lose nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.checkout import ROOT, environment
from tests.hosts.network import missing

# Each kind of fault once, and the first one that the soak makes.
FAULTS = 14
TIMEOUT_S = 270


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("flags", [[], ["--calls"]], ids=["called", "calling"])
def test_each_fault_loses_nothing(flags: list[str]) -> None:
    if lacks := missing():
        pytest.skip(f"network namespaces: {lacks}")
    command = [sys.executable, "-m", "tests.hosts", "--faults", str(FAULTS), "--seed", "5", *flags]
    command += ["--callers", "4", "--texts", "4", "--longest-s", "2.5", "--interval-s", "0.1"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found["faults"]) >= FAULTS - 2 and found["sequences"] and found["tokens"], found
