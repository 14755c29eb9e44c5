"""Deliberate mistakes in the kernels are noticed: a test that cannot fail says nothing.

Each mutation of `mutations_*.py` is made in a copy of `kernels`, and its tests are run with that copy. They
must fail, or crash on an address that is wrong; and all of them must pass on the kernels as they are.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda.mutation import Mutation

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NOTICED = (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV)


def mutations() -> list[Mutation]:
    """What all mutations_*.py list."""
    modules = sorted(path.stem for path in HERE.glob("mutations_*.py"))
    found: list[Mutation] = []
    for module in modules:
        found += importlib.import_module(f"tests.kernels.cuda.{module}").MUTATIONS
    return found


def run_tests(root: Path, *selections: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, in the interpreter, with the `kernels` found in `root`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=0"]
    # pytest puts these first on the path, in this order.
    command += ["-o", f"pythonpath={root} {ROOT} {ROOT / 'clients' / 'python'}", *selections]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_names_are_distinct_and_tests_pass_without_mistakes() -> None:
    known = mutations()
    assert known and len({mutation.name for mutation in known}) == len(known)
    outcome = run_tests(ROOT, *sorted({mutation.test for mutation in known}))
    assert outcome.returncode == pytest.ExitCode.OK, outcome.stdout


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path.joinpath(*mutation.module.split(".")).with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, "the text to replace must occur exactly once"
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    outcome = run_tests(tmp_path, mutation.test)
    assert outcome.returncode in NOTICED, f"{outcome.returncode}: {outcome.stdout}{outcome.stderr}"
    assert "InterpreterError" not in outcome.stdout, "the mutation does not run, so it shows nothing"
