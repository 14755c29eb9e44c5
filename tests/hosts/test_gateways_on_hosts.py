"""Gateways, workers, a database and callers on hosts of their own: no fault of any of them loses a token."""

from __future__ import annotations

import json

import pytest

from tests import quire_command
from tests.hosts.gateways import lacks

# Of each kind the soak makes one before it repeats any; these are the first of this seed.
FAULTS = 8
TIMEOUT_S = 400


# Lost gateways and leases in a database: tests/e2e/test_shared_shards.py and tests/sim/test_shards.py. Links
# that are cut: tests/e2e/test_remote_workers.py, and in virtual time tests/sim/test_shell.py.
@pytest.mark.thorough
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_faults_of_several_gateways_lose_nothing() -> None:
    if found := lacks():
        pytest.skip(f"network namespaces with a database: {found}")
    flags = ["--faults", str(FAULTS), "--seed", "3", "--callers", "4", "--texts", "2"]
    flags += ["--longest-s", "2", "--interval-s", "0.1", "--spare-workers"]
    done = quire_command.soak("tests.hosts.gateways", *flags, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found_by_it = json.loads(done.stdout)
    assert len(found_by_it["faults"]) >= FAULTS - 2 and found_by_it["tokens"], found_by_it
