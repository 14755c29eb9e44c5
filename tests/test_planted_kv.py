"""Tests of faults notice mistakes in KV: each fails where one is planted in the workers that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from tests.planted_kv import HOOK, PLANTS

FAILING = {
    "forwards": (
        "client/test_session.py",
        "client/test_session_aio.py",
        "e2e/test_adoption.py",
        "e2e/test_gateways.py",
        "e2e/test_remote_workers.py",
        "e2e/test_rolling_upgrade.py",
        "e2e/test_session.py",
        "e2e/test_shared_shards.py",
        "e2e/test_soak.py",
        "e2e/test_worker_faults.py",
        "hosts/test_gateways_on_hosts.py",
        "soak/test_short_soak.py",
    ),
    "copies": ("e2e/test_session.py",),
    "adoptions": (
        "e2e/test_adoption.py",
        "e2e/test_gateways.py",
        "e2e/test_remote_workers.py",
        "e2e/test_rolling_upgrade.py",
        "e2e/test_shared_shards.py",
    ),
    "files": ("e2e/test_kv_disk.py",),
}
CASES = [(plant, file) for plant, files in FAILING.items() for file in files]


# In the simulator's workers, in every run: tests/sim/test_conformance.py.
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plant", "file"), CASES, ids=[f"{plant}-{file}" for plant, file in CASES])
def test_a_mistake_is_noticed(plant: str, file: str) -> None:
    path = os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "--thorough", f"tests/{file}"]
    env = os.environ | {"PLANTED_KV": plant, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-5000:]


def test_each_mistake_has_tests() -> None:
    assert FAILING.keys() == PLANTS.keys()
    assert all(Path(ROOT, "tests", file).exists() for _, file in CASES)
