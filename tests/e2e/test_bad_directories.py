"""`quire serve` of a bad directory ends by itself: one worker was started, one line says what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests import quire_command
from tests.bad_directories import BAD_DIRECTORIES, BadDirectory, make_good
from workers.common.protocol import EXIT_CONFIG

# Before and after the weights are read. tests/workers/test_bad_directories.py has all of them.
CHOSEN = ("a FIFO as the weights", "NaN in a weight")


@pytest.mark.parametrize(
    "bad", [{bad.name: bad for bad in BAD_DIRECTORIES}[name] for name in CHOSEN], ids=CHOSEN
)
def test_the_server_ends_and_says_why(tmp_path: Path, bad: BadDirectory) -> None:
    directory = make_good(tmp_path / "model", sharded=bad.sharded)
    bad.damage(directory)
    command = quire_command.command("serve", "--no-self-check", "--log-format", "json")
    flags = ["--listen", "127.0.0.1:0", "--model", str(directory)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)
    records = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    refusals = [r["error"] for r in records if r["event"] == "cannot serve with this configuration"]
    assert done.returncode == EXIT_CONFIG
    assert "Traceback" not in done.stderr
    assert not any("model" in record for record in records), "it is not announced before it is checked"
    assert len(refusals) == 1 and re.search(bad.says, refusals[0])
    assert [record["event"] for record in records].count("worker started") == 1
