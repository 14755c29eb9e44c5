"""Deliberate mistakes in the compiled attention are noticed, as those in the Triton kernels are.

All of them are made in one copy, which is built once: none is in code that the tests of another reach.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests
from tests.kernels.instruction_sets import instructions_used

TESTS = "tests/kernels/test_attention.py::test_as_in_float64[compiled-"
# By the feature whose tests have to fail: what the source says, and what it is made to say.
MISTAKES = {
    "softcap": ("hyperbolic_tangent(products * scale) * softcap", "products * scale * softcap"),
    "sinks": ("a.sinks == nullptr ? 0.0f", "highest == highest ? 0.0f"),
    "alibi_slopes": ("slope * __builtin_convertvector", "-slope * __builtin_convertvector"),
}
SOURCE = "kernels/cpu/attention_scores.h"
# What is wrong with trees, whose tests the others do not reach.
TREE_SOURCE = "kernels/cpu/attention_trees.h"
TREE_MISTAKE = ("ahead[i] = later & 1 ? 1 -", "ahead[i] = later ? 1 -")
REPLACED = {SOURCE: [*MISTAKES.values()], TREE_SOURCE: [TREE_MISTAKE]}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of `kernels` that has all mistakes, and is built by the tests that use it."""
    root = tmp_path_factory.mktemp("mistaken")
    ignored = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=ignored)
    for name, mistakes in REPLACED.items():
        source = root / name
        text = source.read_text(encoding="utf-8")
        for old, new in mistakes:
            text = text.replace(old, new)
        source.write_text(text, encoding="utf-8")
    return root


def test_what_the_mistakes_replace_is_there_once() -> None:
    for name, mistakes in REPLACED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [text.count(old) for old, _ in mistakes] == [1] * len(mistakes), name


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_each_is_noticed_and_nothing_else_is(mistaken: Path) -> None:
    instructions_used()
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with ForkedTests() as forked:
        plain = forked.run(mistaken, f"{TESTS}long_decodes-fp32-None]")
        assert plain.returncode == pytest.ExitCode.OK and "passed" in plain.output, plain.output
        for feature in MISTAKES:
            outcome = forked.run(mistaken, f"{TESTS}features_of_few_tokens-fp32-None-{feature}-3]")
            assert outcome.returncode in NOTICED, f"{feature}: {outcome.output}"
            assert "not callable" not in outcome.output, "computed by torch"
        for dtype in ("fp32", "bf16"):  # the kernel for few tokens, and both
            outcome = forked.run(mistaken, f"{TESTS}long_trees-{dtype}-None]")
            assert outcome.returncode in NOTICED, outcome.output
