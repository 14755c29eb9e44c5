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
SOURCES = ("experts.cpp", "linear.cpp", "packed_product.cpp", "gated_activation.cpp")
EXPERTS, PRODUCT = "experts.cpp", "packed_product.cpp"
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
        "std::min(kBlockOutputs, products.outputs - output)",
        "kBlockOutputs",
    ),
    "the gate is up": (
        EXPERTS,
        "both_rows[place], both_rows[place] + a",
        "both_rows[place], both_rows[place] + 0 * a",
    ),
    "inputs are not filled up": (
        PRODUCT,
        "products.weight + block * block_size",
        "products.weight + block * kBlockOutputs * products.inputs",
    ),
    "a second tile has the rows of the first": (PRODUCT, "products.rows + row,", "products.rows,"),
    "a second tile is the first": (PRODUCT, "write(products, row + r,", "write(products, r,"),
    "sums begin with each other": (
        PRODUCT,
        "sums[r][b] = zero_sums();",
        "if (b == 0) sums[r][b] = zero_sums();",
    ),
}


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
        assert text.count(old) == 1, "the text to replace must occur exactly once"
        (directory / name).write_text(text.replace(old, new), encoding="utf-8")
    with ForkedTests() as forked:
        outcome = forked.run(tmp_path, *TESTS)
    if mistake is None:
        assert outcome.returncode == pytest.ExitCode.OK and "passed" in outcome.output, outcome.output
    else:
        # An address that is wrong may also be one that the allocator finds out about.
        assert outcome.returncode in (*NOTICED, -signal.SIGABRT), outcome.output
        assert "BuildError" not in outcome.output
