"""The commands of docs/commands.md, run by a shell as they are written there, but with paths of the test."""

from __future__ import annotations

import re
import runpy
import socket
import tomllib
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from service.config import all_settings
from tests.client.pages import blocks, install_command, run_script
from tests.service.journal_traffic import open_journal

PAGE = "docs/commands.md"
ADDRESS, DATA = "127.0.0.1:50051", "/var/lib/quire"
PATHS = {DATA: "data", "/var/backups/quire": "backup"}
CHECK, JOURNAL, COMPLETION = range(3)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with the command, the file of the page, a journal, and a home."""
    install_command(tmp_path)
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
    said = run(here, CHECK)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(model = .+?)```", page, flags=re.MULTILINE | re.DOTALL)
    assert [line.split()[0] for line in shown.splitlines()] == [line.split()[0] for line in said.splitlines()]
    assert "workers = 2  # quire.toml:3\n" in said and said.splitlines()[-1] == shown.splitlines()[-1]


def test_settings_of_all_pages_are_valid() -> None:
    """Tables of tokens and runtimes are no settings."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in blocks(f"docs/{page.name}", "toml"):
            content = tomllib.loads(text)
            if content.keys() & all_settings().keys() - {"tokens", "runtimes"}:
                for name, value in content.items():
                    setting = all_settings()[name]
                    assert setting.is_path or setting.parse(value, page.name, text=False) == value
                found.append(page.name)
    assert "commands.md" in found


def test_the_page_of_all_settings_is_up_to_date() -> None:
    written = runpy.run_path(str(ROOT / ".ci" / "settings_page.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == written, "run make stubs"


def test_the_reference_of_the_python_client_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / ".ci" / "python_page.py"))
    assert (ROOT / "docs" / "python.md").read_text(encoding="utf-8") == page["page"](), "run make stubs"
    assert not page["undocumented"]()


def test_journal(here: Path) -> None:
    said = run(here, JOURNAL)
    assert "0 records in 0 frames give 0 caches; all is well" in said
    assert [*here.glob("backup-????-??-??/journal/*.log")]


def test_completion(here: Path) -> None:
    run(here, COMPLETION)
    assert "journal" in (here / ".local/share/bash-completion/completions/quire").read_text()
