"""`--require NAME`: a test that is skipped for want of that fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REQUIRED, without_what_is_required

ROOT = Path(__file__).resolve().parent


def skipped(reason: str) -> pytest.TestReport:
    where = ("test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_x.py::test_x", ("test_x.py", 1, "test_x"), {}, "skipped", where, "setup")


@pytest.mark.parametrize(
    ("names", "reason", "outcome"),
    [
        (["postgresql"], "needs initdb of PostgreSQL", "failed"),
        (["grpcurl"], "needs initdb of PostgreSQL", "skipped"),
        ([], "needs initdb of PostgreSQL", "skipped"),
        (["grpcurl", "namespaces"], "network namespaces: no TUN", "failed"),
    ],
)
def test_what_is_required_is_not_skipped(names: list[str], reason: str, outcome: str) -> None:
    assert without_what_is_required(names, skipped(reason)).outcome == outcome


def test_each_name_is_that_of_some_skip() -> None:
    """Else nothing would ever fail by it."""
    skips = subprocess.run(
        ["git", "grep", "-hE", "skip|reason=", "--", ".", ":!test_require.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert {name for name, reason in REQUIRED.items() if not re.search(reason, skips)} == set()
