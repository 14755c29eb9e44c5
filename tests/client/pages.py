"""The blocks of code in README and the manual, and a shell that runs them with paths of the test."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT, environment
from tests import quire_command
from tests.programs import output_of

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "clients" / "node" / "README.md")
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    language: str
    text: str

    def lines(self) -> list[str]:
        """The commands of a shell, one a line, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(re.sub(r"\s+# .*", "", line).split()) for line in lines if line.strip()]

    def words(self, beginning: str) -> list[str]:
        """What a shell makes of the one command that begins like this."""
        (line,) = [line for line in self.lines() if line.startswith(beginning)]
        return shlex.split(line)


def blocks(page: str, language: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(page, language, block) for block in found]


def run_python(script: Path, *arguments: str) -> str:
    """What a Python program prints, in this process, which has imported most of what it imports."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        # As in a program. Nothing is said of resources: garbage of earlier tests may be found here, their
        # caches too.
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", ResourceWarning)
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def install_command(directory: Path) -> None:
    """The command as `.venv/bin/quire`."""
    command = directory / ".venv" / "bin" / "quire"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {shlex.join(quire_command.command())} "$@"\n')
    command.chmod(0o755)


def run_script(script: str, directory: Path, paths: Mapping[str, str]) -> str:
    """What the shell prints in this directory, its home. `paths` of the page are replaced by ones in it."""
    for written, ours in paths.items():
        script = script.replace(written, str(directory / ours))
    # What measures the machine keeps one core busy, and not all of them.
    own = {"HOME": str(directory), "XDG_STATE_HOME": str(directory / "state"), "OMP_NUM_THREADS": "1"}
    shell = shutil.which("bash") or "sh"
    return output_of(shell, "-eu", "-c", script, env=environment(ROOT) | own, cwd=directory)
