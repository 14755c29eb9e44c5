"""Deliberate mistakes in the compiled adapters are noticed: see `test_attention_mistakes_cpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.mistakes import Mistake, assert_is_there_once, assert_noticed

TESTS = ("tests/kernels/test_lora.py",)
SOURCES = ("lora.cpp", "linear.cpp", "packed_product.cpp", "amx_product.cpp", "threads.cpp")
LORA = "lora.cpp"
# By what goes wrong.
MISTAKES: dict[str, Mistake] = {
    "the inputs are those of other rows": (
        LORA,
        "x_ + rows_[place + i] * x_stride_",
        "x_ + (place + i) * x_stride_",
    ),
    "copies are of other rows": (LORA, "x_ + rows_[place] * x_stride_", "x_ + place * x_stride_"),
    "rows lie close together": (LORA, "x_stride_(x_stride)", "x_stride_(inputs)"),
    "other rows are added to": (
        LORA,
        "y_ + rows_[place + i] * width_",
        "y_ + (first_ + place + i) * width_",
    ),
    "all parts have the ranks of the first": (LORA, "      rank += pairs.ranks[part];\n", ""),
    "all parts are added to the first": (LORA, "      output += outputs;\n", ""),
    "a part loses its last block": (LORA, "block += blocks;", "block += blocks + 1;"),
    "results replace what is there": (LORA, "outputs, true}", "outputs, false}"),
    "only the first rows pass": (LORA, "begin = end)", "begin = rows.groups.size())"),
    "the ranks are those of the last group": (
        LORA,
        "most_ranks_ = std::max(most_ranks_, ranks_of(pairs))",
        "most_ranks_ = ranks_of(pairs)",
    ),
    "a group has several slots": (LORA, "groups.back().slot != slot || ", ""),
    "a row without an adapter has the first": (
        LORA,
        "if (slot_of(row) >= 0) rows.push_back(row);",
        "rows.push_back(row);",
    ),
    "few inputs are filled up to 32": (
        "packed_product.h",
        "inputs < kGroupInputs ? 2 : kGroupInputs",
        "kGroupInputs",
    ),
    "the sum is rounded twice": (
        "packed_product.cpp",
        "sum += load_lanes(result, lanes)",
        "sum = rounded(sum, result) + load_lanes(result, lanes)",
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
