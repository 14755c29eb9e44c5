"""Deliberate mistakes in kernels are noticed: a test that cannot fail says nothing.

Each is made in a copy of `kernels`, of which only the sources that its tests need are compiled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernels.instruction_sets import instructions_used, need_compiled
from tests.kernels.test_amx import SOURCES as PRODUCTS

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = Path("kernels") / "cpu"
# An address that is wrong may also be one that the allocator finds out about.
NOTICED = (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV, -signal.SIGABRT)
_ATTENTION = "tests/kernels/test_attention.py::test_as_in_float64[compiled-"
_FEATURES = f"{_ATTENTION}features_of_few_tokens-fp32-None-"


@dataclass(frozen=True, slots=True)
class Mistake:
    """`source` says `old` once, and is made to say `new`; then each of `tests` fails."""

    source: str
    old: str
    new: str
    tests: Sequence[str]
    compiled: Sequence[str] | None = None
    directory: Path = DIRECTORY


def of_experts(source: str, old: str, new: str) -> Mistake:
    tests = ("tests/kernels/test_experts_cpu.py tests/kernels/test_linear.py",)
    return Mistake(source, old, new, tests, (*PRODUCTS, "quantise.cpp", "group_rows.cpp"))


def of_adapters(source: str, old: str, new: str) -> Mistake:
    compiled = ("lora.cpp", "linear.cpp", "packed_product.cpp", "amx_product.cpp", "threads.cpp")
    return Mistake(source, old, new, ("tests/kernels/test_lora.py",), compiled)


def of_gpu_weights(old: str, new: str) -> Mistake:
    tests = ("tests/kernels/cuda/test_gpu_weight.py -k elements",)
    sources = *PRODUCTS, "quantise.cpp", "group_rows.cpp"
    return Mistake("dequantise.py", old, new, tests, sources, Path("kernels") / "cuda")


# By what goes wrong: one for each source whose results other tests compare.
MISTAKES = {
    "scores are not capped": Mistake(
        "attention_scores.h",
        "hyperbolic_tangent(products * scale) * softcap",
        "products * scale * softcap",
        [f"{_FEATURES}softcap-3]"],
    ),
    # The kernel for few tokens, and both.
    "tokens of a tree see their siblings": Mistake(
        "attention_trees.h",
        "ahead[i] = later & 1 ? 1 -",
        "ahead[i] = later ? 1 -",
        [f"{_ATTENTION}long_trees-{dtype}-None]" for dtype in ("fp32", "bf16")],
    ),
    "a row of another token": of_experts(
        "experts.cpp",
        "const int64_t token = groups.pairs[place] / a.choices;",
        "const int64_t token = groups.pairs[place] % a.tokens;",
    ),
    "a second tile is the first": of_experts(
        "packed_product.cpp", "sums + row * stride, stride,", "sums, stride,"
    ),
    "the inputs are those of other rows": of_adapters(
        "lora.cpp", "x_ + (places_.x == nullptr ? rows_[place] :", "x_ + (places_.x == nullptr ? place :"
    ),
    "a group has several slots": of_adapters("lora.cpp", "groups.back().slot != slot || ", ""),
    # In Triton's interpreter.
    "the second value of a byte comes first": of_gpu_weights(
        "tl.join(codes & 15, codes >> 4)", "tl.join(codes >> 4, codes & 15)"
    ),
    "subscales of the whole group": of_gpu_weights(
        "signed(rows + subscales_at, begin // FORM.unit, mask)",
        "signed(rows + subscales_at, begin // 32, mask)",
    ),
}


def copy_kernels(to: Path, compiled: Sequence[str] | None) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(ROOT / "kernels", to / "kernels", ignore=ignored)
    for path in (to / DIRECTORY).glob("*.cpp"):
        if compiled is not None and path.name not in compiled:
            path.unlink()


def run(root: Path, selection: str) -> tuple[int, str]:
    """Runs tests with the `kernels` in `root`. The exit status of pytest, and what it wrote."""
    # pytest puts these first on the path, in this order.
    path = f"pythonpath={root} {ROOT} {ROOT / 'clients' / 'python'}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *selection.split()], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _needs_a_compiler(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("thorough"):
        need_compiled()
        instructions_used()
        if shutil.which("g++") is None:
            pytest.skip("needs g++")


def test_what_the_mistakes_replace_is_there_once() -> None:
    for name, mistake in MISTAKES.items():
        text = (ROOT / mistake.directory / mistake.source).read_text(encoding="utf-8")
        assert text.count(mistake.old) == 1, name


# A passing run without a mistake shows that what is noticed is the mistake.
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_copies_without_a_mistake_pass(tmp_path: Path) -> None:
    compiled = {mistake.compiled: {*mistake.tests} for mistake in MISTAKES.values()}
    for number, (sources, tests) in enumerate(compiled.items()):
        copy_kernels(tmp_path / str(number), sources)
        for selection in tests:
            status, output = run(tmp_path / str(number), selection)
            assert status == pytest.ExitCode.OK and "passed" in output, output


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MISTAKES)
def test_each_is_noticed(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    copy_kernels(tmp_path, mistake.compiled)
    source = tmp_path / mistake.directory / mistake.source
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    for selection in mistake.tests:
        status, output = run(tmp_path, selection)
        assert status in NOTICED, output
        assert "BuildError" not in output
        assert "not callable" not in output, "computed by torch"
