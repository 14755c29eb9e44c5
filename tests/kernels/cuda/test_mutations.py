"""Deliberate mistakes in the kernels are noticed: a test that cannot fail says nothing.

Each mutation of `mutations.py` is made in a copy of `kernels`, and its tests are run with that copy. They
must fail, or crash on an address that is wrong; and all must pass on the kernels as they are. What was
noticed before, with the same kernels and tests, is read from found.json (`found_mutations.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.kernels.cuda.forked_tests import ROOT, ForkedTests
from tests.kernels.cuda.found_mutations import check, copy_kernels, is_known, make
from tests.kernels.cuda.mutations import MUTATIONS, Mutation


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedTests]:
    with ForkedTests() as forked:
        yield forked


def test_names_are_distinct_and_their_tests_exist(forked: ForkedTests) -> None:
    """That the tests pass without mistakes, they show themselves."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    outcome = forked.run(ROOT, "--collect-only", *sorted({mutation.test for mutation in MUTATIONS}))
    assert outcome.returncode == pytest.ExitCode.OK, outcome.output


def test_a_copy_without_a_mistake_passes(forked: ForkedTests, tmp_path: Path) -> None:
    """What is noticed is the mistake, and not that the tests are run with a copy, or forked."""
    copy_kernels(tmp_path)
    outcome = forked.run(tmp_path, MUTATIONS[0].test)
    assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output


def test_a_mistake_is_not_known_by_its_name() -> None:
    """Another one, or one that another test has to notice, is made anew."""
    known = MUTATIONS[0]
    others = [dataclasses.replace(known, new="pass"), dataclasses.replace(known, test=MUTATIONS[-1].test)]
    assert not any(map(is_known, others))


def tries() -> list[ParameterSet]:
    """The first, and every third of those that are not known of; all of them with --thorough."""
    unknown = [mutation for mutation in MUTATIONS if not is_known(mutation)]
    now = [MUTATIONS[0], *unknown[::3]]
    return [
        pytest.param(mutation, id=mutation.name, marks=() if mutation in now else pytest.mark.thorough)
        for mutation in MUTATIONS
    ]


@pytest.mark.parametrize("mutation", tries())
def test_is_noticed(mutation: Mutation, forked: ForkedTests, tmp_path: Path) -> None:
    check(make(mutation, forked, tmp_path))
