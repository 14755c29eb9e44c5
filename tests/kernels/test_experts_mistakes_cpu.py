"""Deliberate mistakes in the compiled mixture of experts are noticed: see `test_attention_mistakes_cpu`."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests
from tests.kernels.instruction_sets import need_compiled

TESTS = ("tests/kernels/test_experts_cpu.py", "tests/kernels/test_linear.py")
# What those tests need of the library: a whole one takes longer to build.
SOURCES = (
    *("experts.cpp", "linear.cpp", "packed_product.cpp", "amx_product.cpp"),
    *("gated_activation.cpp", "threads.cpp"),
)
EXPERTS, PRODUCT, LAYOUT = "experts.cpp", "packed_product.cpp", "packed_product.h"
# What goes wrong: the source, what it says, and what it is made to say.
MISTAKES = {
    "a row of another token": (
        EXPERTS,
        "groups.pairs[place] / a.choices]",
        "groups.pairs[place] % a.tokens]",
    ),
    "rows lie close together": (EXPERTS, "x + token * a.x_stride", "x + token * a.width"),
    "results stay by expert": (
        EXPERTS,
        "results + groups.pairs[place] * a.width",
        "results + place * a.width",
    ),
    "products are not rounded": (
        EXPERTS,
        "total += load_lanes(results + choice * a.width + d, count) * splat(weights[choice])",
        "total = fused(load_lanes(results + choice * a.width + d, count), splat(weights[choice]), total)",
    ),
    "the sum is backwards": (
        EXPERTS,
        "choice = 1; choice < a.choices; choice++",
        "choice = a.choices - 1; choice > 0; choice--",
    ),
    "one expert too many": (EXPERTS, "expert >= a.experts", "expert > a.experts"),
    "a last block is as wide as others": (
        PRODUCT,
        "std::min(blocks * kBlockOutputs, products.outputs - first)",
        "blocks * kBlockOutputs",
    ),
    "the gate is up": (
        EXPERTS,
        "both_rows[place], both_rows[place] + a",
        "both_rows[place], both_rows[place] + 0 * a",
    ),
    "inputs are not filled up": (LAYOUT, "(inputs + kGroup - 1) / kGroup * kGroup", "inputs"),
    "a second tile has the rows of the first": (
        PRODUCT,
        "rows + row, next_row - row",
        "rows, next_row - row",
    ),
    "a second tile is the first": (PRODUCT, "sums + row * stride, stride,", "sums, stride,"),
    "a second panel has the inputs of the first": (PRODUCT, "[first + row] + input", "[first + row]"),
    "a second pass is the first": (PRODUCT, "write(products, first + row,", "write(products, row,"),
    "sums begin with each other": (
        PRODUCT,
        "std::fill_n(sums,",
        "if (block == begin) std::fill_n(sums,",
    ),
}


def test_what_the_mistakes_replace_is_there_once() -> None:
    for name, old, _ in MISTAKES.values():
        assert (ROOT / "kernels" / "cpu" / name).read_text(encoding="utf-8").count(old) == 1, old


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_each_is_noticed_and_nothing_else_is(mistake: str | None, tmp_path: Path) -> None:
    need_compiled()
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    ignored = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignored)
    directory = tmp_path / "kernels" / "cpu"
    for path in directory.glob("*.cpp"):
        if path.name not in SOURCES:
            path.unlink()
    if mistake is not None:
        name, old, new = MISTAKES[mistake]
        text = (directory / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace(old, new), encoding="utf-8")
    with ForkedTests() as forked:
        outcome = forked.run(tmp_path, *TESTS)
    if mistake is None:
        assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output
    else:
        # An address that is wrong may also be one that the allocator finds out about.
        assert outcome.returncode in (*NOTICED, -signal.SIGABRT), outcome.output
        assert "BuildError" not in outcome.output
