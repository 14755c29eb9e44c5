"""Deliberate mistakes in the compiled mixture of experts are noticed: see `test_attention_mistakes_cpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.mistakes import Mistake, assert_is_there_once, assert_noticed

TESTS = ("tests/kernels/test_experts_cpu.py", "tests/kernels/test_linear.py")
# What those tests need of the library: a whole one takes longer to build.
SOURCES = (
    *("experts.cpp", "linear.cpp", "packed_product.cpp", "amx_product.cpp"),
    *("gated_activation.cpp", "threads.cpp"),
)
EXPERTS, PRODUCT, LAYOUT = "experts.cpp", "packed_product.cpp", "packed_product.h"
# By what goes wrong.
MISTAKES: dict[str, Mistake] = {
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
    "inputs are not filled up": (LAYOUT, "(inputs + group - 1) / group * group", "inputs"),
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_the_mistakes_replace_is_there_once(mistake: str) -> None:
    assert_is_there_once(MISTAKES[mistake])


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_each_is_noticed_and_nothing_else_is(mistake: str | None, tmp_path: Path) -> None:
    assert_noticed(None if mistake is None else MISTAKES[mistake], tmp_path, SOURCES, TESTS)
