"""What GitHub reads: its schemas accept each file, and the commands in it exist. None of it has run there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.programs import output_of

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
SCHEMAS = {
    "workflows/*.yml": "vendor.github-workflows",
    "ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "dependabot.yml": "vendor.dependabot",
}


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_the_schemas_of_github_accept_it(pattern: str) -> None:
    files = sorted(map(str, GITHUB.glob(pattern)))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[pattern], *files]
    output_of(*command)


def test_every_file_has_a_schema() -> None:
    checked = {path for pattern in SCHEMAS for path in GITHUB.glob(pattern)}
    assert checked == set(GITHUB.rglob("*.yml"))


def test_the_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in (GITHUB / "workflows").glob("*.yml"):
        for words in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", workflow.read_text()):
            assert set(words.split()) <= targets, workflow.name
