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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from _pytest.mark import ParameterSet

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


def test_names_are_distinct_and_their_tests_exist() -> None:
    """That the tests pass without mistakes, they show themselves."""
    known = mutations()
    assert known and len({mutation.name for mutation in known}) == len(known)
    outcome = run_tests(ROOT, "--collect-only", *sorted({mutation.test for mutation in known}))
    assert outcome.returncode == pytest.ExitCode.OK, outcome.stdout


def try_mutation(mutation: Mutation, root: Path) -> subprocess.CompletedProcess[str]:
    """Make the mistake in a copy below `root`, and run its tests."""
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    source = root.joinpath(*mutation.module.split(".")).with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, "the text to replace must occur exactly once"
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return run_tests(root, mutation.test)


Outcomes = Mapping[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What is tried, by its name. Every core tries one: each takes seconds to import what it needs."""
    chosen: list[Mutation] = [
        cast(Mutation, item.callspec.params["mutation"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_is_noticed"
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        roots = (tmp_path_factory.mktemp("mistake") for _ in chosen)
        yield {
            mutation.name: pool.submit(try_mutation, mutation, root)
            for mutation, root in zip(chosen, roots, strict=True)
        }
        pool.shutdown(cancel_futures=True)


def tries() -> list[ParameterSet]:
    """Every third in each run, all of them with --thorough: each takes seconds."""
    return [
        pytest.param(mutation, id=mutation.name, marks=() if number % 3 == 0 else pytest.mark.thorough)
        for number, mutation in enumerate(mutations())
    ]


@pytest.mark.parametrize("mutation", tries())
def test_is_noticed(mutation: Mutation, outcomes: Outcomes) -> None:
    outcome = outcomes[mutation.name].result()
    assert outcome.returncode in NOTICED, f"{outcome.returncode}: {outcome.stdout}{outcome.stderr}"
    assert "InterpreterError" not in outcome.stdout, "the mutation does not run, so it shows nothing"
