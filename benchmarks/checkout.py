"""The checkout whose code is measured: this one, or another one to compare with (`--against`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
    project = tomllib.loads((root / "clients" / "python" / "pyproject.toml").read_text(encoding="utf-8"))
    module, function = project["project"]["scripts"]["quire"].split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", code, *arguments]


def build_kernels(root: Path) -> None:
    """Compiles the checkout's CPU kernels if needed, because without them it would run slowly."""
    command = [sys.executable, "-m", "kernels.cpu.library"]
    subprocess.run(command, cwd=root, env=environment(root), check=True)  # noqa: S603 - our own program
