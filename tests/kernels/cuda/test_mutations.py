"""Deliberate mistakes in the kernels are noticed: a test that cannot fail says nothing.

Each mutation of `mutations.txt` is made in a copy of `kernels`, and its test is run with that copy. It must
fail, or crash on an address that is wrong; and pass on the kernels as they are. There is one for each
test of each module. They are made with --thorough.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests
from tests.kernels.cuda.mutations import MUTATIONS, Mutation


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedTests]:
    with ForkedTests() as forked:
        yield forked


def source_of(mutation: Mutation, root: Path) -> Path:
    return root.joinpath(*mutation.module.split(".")).with_suffix(".py")


def copy_kernels(to: Path) -> None:
    shutil.copytree(ROOT / "kernels", to / "kernels", ignore=shutil.ignore_patterns("__pycache__"))


def test_each_can_be_made() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = source_of(mutation, ROOT).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name


@pytest.mark.thorough
def test_the_test_of_each_exists(forked: ForkedTests) -> None:
    outcome = forked.run(ROOT, "--collect-only", *sorted({mutation.test for mutation in MUTATIONS}))
    assert outcome.returncode == pytest.ExitCode.OK, outcome.output


@pytest.mark.thorough
def test_a_copy_without_a_mistake_passes(forked: ForkedTests, tmp_path: Path) -> None:
    """What is noticed is the mistake, and not that the tests are run with a copy, or forked."""
    copy_kernels(tmp_path)
    outcome = forked.run(tmp_path, MUTATIONS[0].test)
    assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output


@pytest.mark.thorough
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_is_noticed(mutation: Mutation, forked: ForkedTests, tmp_path: Path) -> None:
    copy_kernels(tmp_path)
    source = source_of(mutation, tmp_path)
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    outcome = forked.run(tmp_path, mutation.test)
    assert outcome.returncode in NOTICED, f"{outcome.returncode}: {outcome.output}"
    assert "InterpreterError" not in outcome.output, "the mutation does not run, so it shows nothing"
