"""Gateway, callers and workers on hosts of their own: faults of hosts and links between them lose nothing."""

from __future__ import annotations

import json

import pytest

from tests import quire_command
from tests.hosts.network import missing

# Everything is killed, and then each fault of links is made once. Those of processes, which --thorough adds,
# are also in tests/soak/test_short_soak.py and, with such workers, in tests/e2e/test_remote_workers.py.
FAULTS, THOROUGH_FAULTS = 8, 14
MORE = ["--callers", "4", "--texts", "2"]
TIMEOUT_S = 270


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize(
    ("faults", "flags"),
    [
        (FAULTS, ["--callers", "2", "--texts", "1"]),
        pytest.param(THOROUGH_FAULTS, MORE, marks=pytest.mark.thorough),
    ],
)
def test_each_fault_loses_nothing(faults: int, flags: list[str]) -> None:
    if lacks := missing():
        pytest.skip(f"network namespaces: {lacks}")
    flags = ["--faults", str(faults), "--seed", "5", *flags]
    flags += ["--longest-s", "2.5", "--interval-s", "0.1"]
    done = quire_command.soak("tests.hosts", *flags, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found["faults"]) >= faults - 2 and found["sequences"] and found["tokens"], found
