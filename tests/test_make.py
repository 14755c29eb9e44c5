"""What a first `make` sets up: for serving nothing to test or check with, and only once for two of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with what a make needs to set up .venv."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in (
        "Makefile",
        ".ci/lock_venv.py",
        "constraints.txt",
        "pyproject.toml",
        "clients/python/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    # Tests that a make runs have its flags.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    output = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output, text=True)


def made(checkout: Path, *arguments: str, fails: bool = False) -> tuple[str, str]:
    """What it says, and its errors."""
    with make(checkout, *arguments) as running:
        output, errors = running.communicate(timeout=60)
    assert bool(running.returncode) == fails, errors
    return output, errors


def test_serving_installs_no_extra(checkout: Path) -> None:
    said, _ = made(checkout, "--dry-run", "serve")
    installs = re.findall(" install (.+?) +>", said)
    assert [line.split()[-1] for line in installs if "--editable" in line] == (
        ["'.[cuda]'"] if shutil.which("nvidia-smi") else ["'.'"]
    )
    assert not re.search(r"\[dev\]|\[bench\]", " ".join(installs))
    assert "quire serve" in said.splitlines()[-1]


def test_what_it_installs_has_nothing_of_tests_and_checks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {name_of(line) for line in project["dependencies"]}
    assert not needed & {name_of(line) for line in project["optional-dependencies"]["dev"]}


# Stands in for Python: writes down which modules it is to run. Its venv waits for the test, its pip talks.
_PYTHON = """
import os, pathlib, shutil, sys
if sys.argv[1] != "-m":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
with open("modules", "a") as modules:
    print(sys.argv[2], file=modules)
if sys.argv[2] == "pip":
    if "--dry-run" in sys.argv and os.path.exists("pip takes cuda"):
        print("Would install nvidia-cublas-13.1 torch-2.13.0")
    print("many lines")
    sys.exit(os.path.exists("pip fails"))
if sys.argv[2] == "uv":
    sys.exit(os.path.exists("uv fails"))
if sys.argv[2] == "venv":
    pathlib.Path(".venv/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, ".venv/bin/python")
    if os.path.exists("begun"):
        # Named pipes: to open them waits for the test. A second one would go on.
        with open("begun", "w"):
            os.unlink("begun")
        open("go").close()
"""


@pytest.fixture
def python(checkout: Path) -> str:
    path = checkout / "python"
    path.write_text(f"#!{sys.executable}{_PYTHON}")
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_what_pip_says_is_shown_where_it_fails(checkout: Path, python: str) -> None:
    (checkout / "pip fails").touch()
    assert "many lines" in made(checkout, python, "setup", fails=True)[1]
    (checkout / "pip fails").unlink()
    output, errors = made(checkout, python, "setup")
    assert "many lines" not in output + errors
    begins = [line.split()[0] for line in output.splitlines()]
    assert begins == ["Creating", "Installing", "for", "Installing", "Installing"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
@pytest.mark.parametrize("fails", [False, True])
def test_without_a_gpu_uv_is_asked_for_a_torch_without_cuda(checkout: Path, python: str, fails: bool) -> None:
    (checkout / "pip takes cuda").touch()
    if fails:
        (checkout / "uv fails").touch()
    output, _ = made(checkout, python, "setup")
    assert "for the CPU, by uv" in output
    assert ("with the libraries of CUDA after all" in output) == fails
    assert "uv" in (checkout / "modules").read_text().split()


def test_of_two_makes_at_once_one_sets_up(checkout: Path, python: str) -> None:
    os.mkfifo(checkout / "begun")
    os.mkfifo(checkout / "go")
    with make(checkout, python, "setup") as first:
        (checkout / "begun").read_text()
        with make(checkout, python, "setup") as second:
            try:
                assert second.stdout is not None
                said = second.stdout.readline()
                assert said == "Waiting for another make, which sets up .venv\n"
            finally:
                (checkout / "go").write_text("")
            assert [first.wait(60), second.wait(60)] == [0, 0]
    run = (checkout / "modules").read_text().split()
    # Once to see what it would take.
    pips = 3 if shutil.which("nvidia-smi") else 4
    assert (run.count("venv"), run.count("pip"), run.count("kernels.cpu.library")) == (1, pips, 3)


def test_kernels_are_compiled_before_anything_is_installed() -> None:
    command = [sys.executable, "-S", "-c", "import kernels.cpu.library"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_no_target_is_a_file() -> None:
    """With a file of that name, `make cluster` would do nothing."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r"^([a-z-]+):", text, re.MULTILINE)) == set(phony.split())
