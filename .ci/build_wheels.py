"""Builds wheels: the client's, and the server's with its kernels compiled for every instruction set.

They are built from copies of the sources, so that nothing of an earlier build in the checkout gets into them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.cpu import library

ROOT = Path(__file__).resolve().parents[1]
# What the server's wheel is made of.
PACKAGES = ("kernels", "service", "workers")
FILES = ("LICENSE", "README.md", "pyproject.toml")


def build(out: Path, names: list[str]) -> None:
    """Builds both wheels into `out`, with the kernels of these instruction sets.

    Raises:
        BuildError: The kernels cannot be compiled.
        CalledProcessError: pip failed, and has said why.
    """
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    with tempfile.TemporaryDirectory() as scratch:
        server, client = Path(scratch, "server"), Path(scratch, "client")
        shutil.copytree(ROOT / "clients" / "python", client, ignore=ignored)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, server / package, ignore=ignored)
        for file in FILES:
            shutil.copy(ROOT / file, server)
        for instructions in library.INSTRUCTION_SETS:
            if instructions.name in names:
                print(f"Compiling the kernels for {instructions.name}", flush=True)
                library.prebuild(instructions, server / library.BUILD_DIR.relative_to(ROOT))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
        subprocess.run([*pip, *options, str(client), str(server)], check=True)  # noqa: S603 - our own pip


def main() -> None:
    """The command."""
    known = [instructions.name for instructions in library.INSTRUCTION_SETS]
    parser = argparse.ArgumentParser(description="Build the wheels of client and server.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--instructions", nargs="+", choices=known, default=known, help="default: all")
    arguments = parser.parse_args()
    try:
        build(arguments.out, arguments.instructions)
    except library.BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
