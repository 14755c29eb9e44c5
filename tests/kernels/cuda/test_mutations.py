"""Deliberate mistakes in the kernels are noticed: a test that cannot fail says nothing.

Each mutation of `mutations_*.py` is made in a copy of `kernels`, and its tests are run with that copy. They
must fail, or crash on an address that is wrong; and all of them must pass on the kernels as they are.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests
from tests.kernels.cuda.mutation import Mutation

HERE = Path(__file__).parent


def mutations() -> list[Mutation]:
    """What all mutations_*.py list."""
    modules = sorted(path.stem for path in HERE.glob("mutations_*.py"))
    found: list[Mutation] = []
    for module in modules:
        found += importlib.import_module(f"tests.kernels.cuda.{module}").MUTATIONS
    return found


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedTests]:
    with ForkedTests() as forked:
        yield forked


def test_names_are_distinct_and_their_tests_exist(forked: ForkedTests) -> None:
    """That the tests pass without mistakes, they show themselves."""
    known = mutations()
    assert known and len({mutation.name for mutation in known}) == len(known)
    outcome = forked.run(ROOT, "--collect-only", *sorted({mutation.test for mutation in known}))
    assert outcome.returncode == pytest.ExitCode.OK, outcome.output


def test_a_copy_without_a_mistake_passes(forked: ForkedTests, tmp_path: Path) -> None:
    """What is noticed is the mistake, and not that the tests are run with a copy, or forked."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    outcome = forked.run(tmp_path, mutations()[0].test)
    assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output


def tries() -> list[ParameterSet]:
    """Every third in each run, all of them with --thorough: each takes seconds."""
    return [
        pytest.param(mutation, id=mutation.name, marks=() if number % 3 == 0 else pytest.mark.thorough)
        for number, mutation in enumerate(mutations())
    ]


@pytest.mark.parametrize("mutation", tries())
def test_is_noticed(mutation: Mutation, forked: ForkedTests, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path.joinpath(*mutation.module.split(".")).with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, "the text to replace must occur exactly once"
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    outcome = forked.run(tmp_path, mutation.test)
    assert outcome.returncode in NOTICED, f"{outcome.returncode}: {outcome.output}"
    assert "InterpreterError" not in outcome.output, "the mutation does not run, so it shows nothing"
