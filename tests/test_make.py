"""What `make serve` asks for in an empty directory: to serve, and nothing to test or check with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.fixture
def said(tmp_path: Path) -> str:
    """The commands of a first `make serve`, which are not run."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "clients/python/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # Tests that a make runs have its flags.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "--dry-run", "serve"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_installs_no_extra(said: str) -> None:
    installs = [line.split(" install ")[1] for line in said.splitlines() if " install " in line]
    assert [line.split()[-1] for line in installs if "--editable" in line] == ["."]
    assert not re.search(r"\.\[|\[dev\]|\[bench\]", " ".join(installs))
    assert "quire serve" in said.splitlines()[-1]


def test_what_it_installs_has_nothing_of_tests_and_checks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {name_of(line) for line in project["dependencies"]}
    assert not needed & {name_of(line) for line in project["optional-dependencies"]["dev"]}
