"""Runs tests of compiled kernels with a deliberate mistake in their sources."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests
from tests.kernels.instruction_sets import need_compiled

# The source in kernels/cpu, what it says, and what it is made to say.
Mistake = tuple[str, str, str]


def assert_is_there_once(mistake: Mistake) -> None:
    name, old, _ = mistake
    assert (ROOT / "kernels" / "cpu" / name).read_text(encoding="utf-8").count(old) == 1, old


def assert_noticed(mistake: Mistake | None, root: Path, sources: Sequence[str], tests: Sequence[str]) -> None:
    """Check that tests fail because of a mistake; None: that they pass without any.

    Args:
        mistake: The mistake.
        root: An empty directory, for a copy of `kernels`.
        sources: The C++ files that the tests need: a whole library takes longer to build.
        tests: Files of tests.
    """
    need_compiled()
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    ignored = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(ROOT / "kernels", root / "kernels", ignore=ignored)
    directory = root / "kernels" / "cpu"
    for path in directory.glob("*.cpp"):
        if path.name not in sources:
            path.unlink()
    if mistake is not None:
        name, old, new = mistake
        text = (directory / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace(old, new), encoding="utf-8")
    with ForkedTests() as forked:
        outcome = forked.run(root, *tests)
    if mistake is None:
        assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output
    else:
        # An address that is wrong may also be one that the allocator finds out about.
        assert outcome.returncode in (*NOTICED, -signal.SIGABRT), outcome.output
        assert "BuildError" not in outcome.output
