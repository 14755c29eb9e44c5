"""The checkout whose code is measured: this one, or another one to compare with (`--against`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Former names of flags.
_OLDER_FLAGS = {"--kv-pages": "--kv-blocks"}


def environment(root: Path) -> dict[str, str]:
    """This environment, with imports from the checkout, and of Quire's settings only the instruction set."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("QUIRE_") or name == "QUIRE_CPU_ISA"
    }
    path = [str(root), str(root / "clients" / "python"), found.get("PYTHONPATH", "")]
    return found | {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}


def quire_command(root: Path, *arguments: str) -> list[str]:
    """The checkout's command `quire`, from its package's entry point."""
    # In the client's package; in older checkouts in the server's.
    projects = [
        tomllib.loads((root / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for place in ("clients/python", ".")
    ]
    script = next(project["scripts"]["quire"] for project in projects if "scripts" in project)
    module, function = script.split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", code, *arguments]


def serve_flags(root: Path, flags: Sequence[str]) -> list[str]:
    """Flags of `quire serve`, with the checkout's names."""
    if root == ROOT:
        return list(flags)
    command, env = quire_command(root, "serve", "--help"), environment(root)
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)  # noqa: S603
    return [flag if flag in done.stdout else _OLDER_FLAGS.get(flag, flag) for flag in flags]


def build_kernels(root: Path) -> None:
    """Compiles the checkout's CPU kernels if needed, because without them it would run slowly."""
    command = [sys.executable, "-m", "kernels.cpu.library"]
    subprocess.run(command, cwd=root, env=environment(root), check=True)  # noqa: S603 - our own program
