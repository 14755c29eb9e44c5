"""The commands of docs/commands.md, run by a shell as they are written there, but with paths of the test."""

from __future__ import annotations

import json
import re
import socket
import tomllib
from pathlib import Path

import jsonschema
import pytest

from benchmarks.checkout import ROOT
from service.config import SETTINGS
from service.config_sources import json_schema
from service.journal.sqlite import open_journal
from tests.client.pages import blocks, install_command, run_script

PAGE = "docs/commands.md"
ADDRESS, DATA = "127.0.0.1:50051", "/var/lib/quire"
PATHS = {DATA: "data", "/var/backups/quire": "backup"}
SETTINGS_BLOCK, DOCTOR, JOURNAL, COMPLETION = range(4)


# For the processes that are forked with torch: what measures the machine takes seconds, to be exact.
INEXACT = """
import sys
if "torch" in sys.modules:
    from workers.models import machine
    machine._READ_S = 0.1
    machine._BUFFER_BYTES = 64 << 20
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the command, the file of the page, a journal, and a home."""
    install_command(tmp_path)
    (tmp_path / "inexact").mkdir()
    (tmp_path / "inexact" / "sitecustomize.py").write_text(INEXACT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inexact"))
    open_journal(tmp_path / "data").close()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (text,) = blocks(PAGE, "toml")
    (tmp_path / "quire.toml").write_text(text.replace(ADDRESS, address).replace(DATA, str(tmp_path / "data")))
    return tmp_path


def run(here: Path, block: int) -> str:
    """What the shell prints when it runs a block of the page."""
    return run_script(blocks(PAGE, "sh")[block], here, PATHS)


def test_settings(here: Path) -> None:
    said = run(here, SETTINGS_BLOCK)
    assert said.startswith("quire.toml: 5 of ") and "no problems" in said
    assert re.search(r"^workers +2 +file quire.toml:4$", said, flags=re.MULTILINE)
    schema = json.loads((here / "quire.schema.json").read_text())
    assert schema == json_schema()
    jsonschema.validate(tomllib.loads((here / "quire.toml").read_text()), schema)


def test_configuration_files_of_all_pages_fit_the_schema() -> None:
    """Those of tokens and runtimes are tables, and no settings."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in blocks(f"docs/{page.name}", "toml"):
            content = tomllib.loads(text)
            if content.keys() & SETTINGS.keys() - {"tokens", "runtimes"}:
                jsonschema.validate(content, json_schema())
                found.append(page.name)
    assert "commands.md" in found


def probes(said: str) -> list[str]:
    """What was looked at, in its order."""
    return [*dict.fromkeys(line[8:19].strip() for line in said.splitlines() if not line.startswith(" "))]


def test_doctor(here: Path) -> None:
    said = run(here, DOCTOR)
    assert max(map(len, said.splitlines())) <= 80
    assert {line.split()[0] for line in said.splitlines() if not line.startswith(" ")} <= {"ok", "slow"}
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(ok .+?)```", page, flags=re.MULTILINE | re.DOTALL)
    assert probes(shown) == probes(said)


def test_journal(here: Path) -> None:
    said = run(here, JOURNAL)
    assert "0 records in 0 rows give 0 caches; all is well" in said
    assert (here / "caches.jsonl").read_text() == "" and [*here.glob("backup-????-??-??/journal.db")]


def test_completion(here: Path) -> None:
    run(here, COMPLETION)
    assert "journal" in (here / ".local/share/bash-completion/completions/quire").read_text()
