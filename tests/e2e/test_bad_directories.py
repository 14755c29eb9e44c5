"""`quire serve` of a bad directory ends by itself: one worker was started, one line says what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from service.journal.values import StoredValues
from tests import quire_command
from tests.bad_directories import BAD_DIRECTORIES, BadDirectory, make_good
from tests.service.journal_traffic import open_journal
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


def test_weights_that_were_loaded_last_and_are_gone(tmp_path: Path) -> None:
    model, home = make_good(tmp_path / "model", sharded=False), tmp_path / "home"
    home.mkdir(mode=0o700)
    gone = {"configured": str(model), "model": str(tmp_path / "gone"), "number": 1, "continued_from": 1}

    async def store() -> None:
        journal = open_journal(home)
        await StoredValues(journal).set({"weights": json.dumps(gone | {"fingerprint": "f"}).encode()})
        journal.close()

    asyncio.run(store())
    flags = ["--listen", "127.0.0.1:0", "--model", str(model), "--data-dir", str(home)]
    command = quire_command.command("serve", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "what was loaded last is gone; put it back, or remove the data directory" in done.stderr
    assert "worker started" not in done.stderr
