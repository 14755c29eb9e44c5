"""Other programs, run until they end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

# Far more than anything takes.
_TIMEOUT_S = 300


def run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program, with our environment if not given another. Returns its status and what it prints."""
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def output_of(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a program prints that succeeds."""
    done = run(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
