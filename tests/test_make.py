"""What `.ci/set_up.py` installs for a make: what its target needs, and only once for two of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = shutil.which("nvidia-smi") is not None


# Modules that stand in for those of the same name, and write down how they were called. The venv may wait for
# the test, and its interpreter runs ours with these modules.
FAKES = {
    "venv.py": r"""
import os, pathlib, sys
python = pathlib.Path(sys.argv[-1], "bin", "python")
python.parent.mkdir(parents=True, exist_ok=True)
python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
python.chmod(0o755)
open("calls", "a").write("venv\n")
if os.path.exists("begun"):
    # Named pipes: to open them waits for the test. A second one would go on.
    with open("begun", "w"):
        os.unlink("begun")
    open("go").close()
""",
    "pip.py": r"""
import json, os, sys
open("calls", "a").write(" ".join(["pip", *sys.argv[1:]]) + "\n")
if "--report" in sys.argv:
    needs = ["sympy"] + ["nvidia-cublas==13.1; platform_system == 'Linux'"] * os.path.exists("pip takes cuda")
    report = {"install": [{"metadata": {"name": "torch", "requires_dist": needs}}]}
    open(sys.argv[sys.argv.index("--report") + 1], "w").write(json.dumps(report))
print("many lines")
sys.exit(os.path.exists("pip fails"))
""",
    "uv.py": r"""
import os, sys
open("calls", "a").write(" ".join(["uv", *sys.argv[1:]]) + "\n")
sys.exit(os.path.exists("uv fails"))
""",
    "compileall.py": "",
    "kernels/cpu/library.py": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with what a make needs to set up .venv, and the fakes."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in (
        "Makefile",
        ".ci/set_up.py",
        "constraints.txt",
        "pyproject.toml",
        "clients/python/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in FAKES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    # Tests that a make runs have its flags.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment["PYTHONPATH"] = str(checkout)
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    output = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output, text=True)


def made(checkout: Path, *arguments: str, fails: bool = False) -> tuple[str, str]:
    """What it says, and its errors."""
    with make(checkout, *arguments) as running:
        output, errors = running.communicate(timeout=60)
    assert bool(running.returncode) == fails, errors
    return output, errors


def calls(checkout: Path) -> list[str]:
    """How the fakes were called since the last time."""
    path = checkout / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_checks_install_neither_torch_nor_quire(checkout: Path) -> None:
    for fake in ("ruff", "buf"):
        path = checkout / ".venv" / "bin" / fake
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh")
        path.chmod(0o755)
    made(checkout, "check-code")
    installs = " ".join(line for line in calls(checkout) if line.startswith("pip"))
    assert "ruff" in installs and "buf-bin" in installs
    assert not re.search("torch|--editable", installs)


def test_nothing_is_installed_twice(checkout: Path) -> None:
    made(checkout, "setup")
    assert [line.split()[0] for line in calls(checkout)].count("venv") == 1
    made(checkout, "setup")
    assert calls(checkout) == []


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml"])
def test_another_version_is_installed_in_place(checkout: Path, changed: str) -> None:
    made(checkout, "kernels")
    calls(checkout)
    with (checkout / changed).open("a") as file:
        file.write("\n# Another one.\n")
    made(checkout, "kernels")
    assert {line.split()[0] for line in calls(checkout)} == {"pip"}


def test_what_was_interrupted_is_made_anew(checkout: Path) -> None:
    (checkout / "pip fails").touch()
    made(checkout, "kernels", fails=True)
    (checkout / "pip fails").unlink()
    calls(checkout)
    made(checkout, "kernels")
    assert calls(checkout)[0] == "venv"


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("fails", [False, True])
def test_without_a_gpu_uv_is_asked_for_a_torch_without_cuda(checkout: Path, fails: bool) -> None:
    (checkout / "pip takes cuda").touch()
    if fails:
        (checkout / "uv fails").touch()
    output, _ = made(checkout, "kernels")
    assert "for the CPU, by uv" in output
    assert ("with the libraries of CUDA after all" in output) == fails
    (asked,) = (line for line in calls(checkout) if line.startswith("uv"))
    assert "--torch-backend cpu torch==" in asked


def test_of_two_makes_at_once_one_sets_up(checkout: Path) -> None:
    os.mkfifo(checkout / "begun")
    os.mkfifo(checkout / "go")
    with make(checkout, "kernels") as first:
        (checkout / "begun").read_text()
        with make(checkout, "kernels") as second:
            try:
                assert second.stdout is not None
                said = second.stdout.readline()
                assert said == "Waiting for another make, which sets up .venv\n"
            finally:
                (checkout / "go").write_text("")
            assert [first.wait(60), second.wait(60)] == [0, 0]
    run = [line.split()[0] for line in calls(checkout)]
    # Once to see what it would take.
    assert (run.count("venv"), run.count("pip")) == (1, 2 if HAS_GPU else 3)


def test_what_a_compiler_leaves_for_a_moment_is_no_package(tmp_path: Path) -> None:
    """Kernels are compiled while pip reads the checkout: a directory that goes again would make it fail."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    scratch = tmp_path / "kernels" / "cpu" / "build" / "tmp_d7ifaiw"
    scratch.mkdir(parents=True)
    found = find_namespace_packages(str(tmp_path), **config["tool"]["setuptools"]["packages"]["find"])
    assert found == ["kernels", "kernels.cpu"]
