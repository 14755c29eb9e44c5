"""A checkout whose code is measured: this one, or an older one that it is compared with (`--against`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a flag was called before.
_OLDER_FLAGS = {"--kv-pages": "--kv-blocks"}


def environment(root: Path) -> dict[str, str]:
    """Ours, but importing from the checkout, and without settings of Quire but for the instruction set."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("QUIRE_") or name == "QUIRE_CPU_ISA"
    }
    path = [str(root), str(root / "clients" / "python"), found.get("PYTHONPATH", "")]
    return found | {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}


def quire_command(root: Path, *arguments: str) -> list[str]:
    """The checkout's `quire`, wherever its package says that lives."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, function = project["scripts"]["quire"].split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", code, *arguments]


def serve_flags(root: Path, flags: Sequence[str]) -> list[str]:
    """Flags of `quire serve` as the checkout calls them."""
    if root == ROOT:
        return list(flags)
    command, env = quire_command(root, "serve", "--help"), environment(root)
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)  # noqa: S603
    return [flag if flag in done.stdout else _OLDER_FLAGS.get(flag, flag) for flag in flags]


def build_kernels(root: Path) -> None:
    """Compiles the checkout's CPU kernels where they are not: without them it would run, and be slow."""
    command = [sys.executable, "-m", "kernels.cpu.library"]
    subprocess.run(command, cwd=root, env=environment(root), check=True)  # noqa: S603 - our own program
