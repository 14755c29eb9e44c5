"""Builds wheels: the client's, and the server's with its kernels compiled for every instruction set.

They are built from copies of the sources, so that nothing of an earlier build in the checkout gets into them.
In the server's copy all packages are inside one, `quire_server`, so that it installs no names that others may
use; imports, and names of modules in strings, are changed accordingly.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.cpu import library

ROOT = Path(__file__).resolve().parents[1]
# What the server's wheel is made of.
PACKAGES = ("kernels", "service", "workers")
FILES = ("LICENSE", "README.md")
# What they are in when they are installed.
OUTER = "quire_server"
# What the compiled kernels need: that of Debian 10 and of Red Hat's 8.
OLDEST_GLIBC = "2.28"
# `from service.config import ...`; "service.cli.serve:run" in a string, and commands that are told.
IMPORT = re.compile(rf"^(\s*from )(?=({'|'.join(PACKAGES)})\b)", re.MULTILINE)
MODULE_NAME = re.compile(rf'("|python -m )(?=({"|".join(PACKAGES)})(\.\w+)+(:[{{\w}}]+)?("|,))')


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
            shutil.copytree(ROOT / package, server / OUTER / package, ignore=ignored)
        put_into_one_package(server)
        for file in FILES:
            shutil.copy(ROOT / file, server)
        for instructions in library.INSTRUCTION_SETS:
            if instructions.name in names:
                print(f"Compiling the kernels for {instructions.name}", flush=True)
                prebuild(instructions, server / OUTER / library.BUILD_DIR.relative_to(ROOT))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
        subprocess.run([*pip, *options, str(client), str(server)], check=True)  # noqa: S603 - our own pip


def prebuild(instructions: library.InstructionSet, directory: Path) -> Path:
    """Compiles the kernels for any machine with Linux and that glibc, with the Clang of the package ziglang.

    This CPU need not have the instructions. `library.load` finds the file in an installation of the same
    sources. Raises BuildError.
    """
    target = directory / f"{library.file_prefix(instructions)}-prebuilt.so"
    system = f"{instructions.machine}-linux-gnu.{OLDEST_GLIBC}"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", system]
    # Zig spells the names of CPUs without hyphens.
    flags = [
        flag.replace("x86-64-", "x86_64_").replace("armv8-a", "generic")
        for flag in instructions.compiler_flags
    ]
    library.compile_sources([*compiler, "-s"], flags, target)
    return target


def put_into_one_package(server: Path) -> None:
    """Changes names of modules in the copied sources, and the settings of the build."""
    (server / OUTER / "__init__.py").touch()
    for path in (server / OUTER).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(MODULE_NAME.sub(rf"\1{OUTER}.", IMPORT.sub(rf"\1{OUTER}.", text)), encoding="utf-8")
    settings = MODULE_NAME.sub(rf"\1{OUTER}.", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = 'include = ["service*", "workers*", "kernels*"]'
    if settings.count(found) != 1:
        raise ValueError(f"pyproject.toml must have once: {found}")
    settings = settings.replace(found, f'include = ["{OUTER}*"]')
    (server / "pyproject.toml").write_text(settings, encoding="utf-8")


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
