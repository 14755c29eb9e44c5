"""The pages of the manual: their blocks of code, and a shell that runs them with paths of the test."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT, environment
from tests import quire_command


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(*command: str, cwd: Path | None = None) -> str:
    """What a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(script: Path, *arguments: str) -> str:
    """What a Python program prints, in this process, which has imported most of what it imports."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        # As in a program.
        warnings.simplefilter("default")
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
    done = subprocess.run(
        [shutil.which("bash") or "sh", "-eu", "-c", script],
        env=environment(ROOT) | own,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
