"""Products of bfloat16 with AMX, emulated where there is none, against its instruction's order of summation.

Intel's manual has the order: from zero, the even inputs of 32 are multiplied and added one after the other,
and so are the odd ones; even + odd is added to the sum of the groups before. Each step rounds once, to
nearest, and denormals are zero as operands and as results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch

from kernels.cpu import library
from kernels.linear import linear, pack_weight
from tests.kernels.instruction_sets import need_compiled, use
from tests.kernels.test_experts_cpu import Case

GROUP = 32
# What products and experts need of the library.
SOURCES = (
    *("experts.cpp", "linear.cpp", "packed_product.cpp", "amx_product.cpp", "grouped_product.cpp"),
    *("dequantised_product.cpp", "float8_product.cpp", "gated_activation.cpp", "lora.cpp", "threads.cpp"),
    "routing.cpp",
)


@pytest.fixture(autouse=True, scope="module")
def _amx(request: pytest.FixtureRequest) -> Iterator[None]:
    need_compiled()
    if "amx_tile" in library.cpu_flags():
        with use("amx"):
            yield
        return
    # A whole library takes three times as long to compile, and an optimised one three times as long again.
    level = "-O3" if request.config.getoption("--thorough") else "-O0"
    with use("emulated-amx", SOURCES, level):
        yield


def rounded(exact: Fraction) -> float:
    """The nearest float32, the even one of two; 0 instead of a denormal."""
    if exact == 0:
        return 0.0
    exponent = math.frexp(exact)[1] if abs(exact) > Fraction(2) ** -1000 else -1000
    unit = Fraction(2) ** (exponent - 24)
    nearest = round(exact / unit) * unit
    if abs(nearest) < Fraction(2) ** -126:
        return 0.0
    return float(nearest) if abs(nearest) < 2**128 else math.copysign(math.inf, exact)


def multiply_add(a: float, b: float, c: float) -> float:
    """The float32 nearest to a * b + c."""
    a, b, c = (0.0 if abs(x) < 2**-126 else x for x in (a, b, c))
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    return rounded(Fraction(a) * Fraction(b) + Fraction(c))


def model(row: list[float], weights: list[float], bias: float = 0.0) -> float:
    """An output before it is rounded to bfloat16."""
    total = 0.0
    for first in range(0, len(row), GROUP):
        even = odd = 0.0
        for i in range(first, min(first + GROUP, len(row)), 2):
            even = multiply_add(row[i], weights[i], even)
            if i + 1 < len(row):
                odd = multiply_add(row[i + 1], weights[i + 1], odd)
        total = multiply_add(1.0, multiply_add(1.0, even, odd), total)
    return multiply_add(1.0, total, bias)


def models(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The outputs of a row in float32: [I], [O, I] -> [O]."""
    biases = [0.0] * len(weight) if bias is None else bias.tolist()
    values = [
        model(row.tolist(), weights, added) for weights, added in zip(weight.tolist(), biases, strict=True)
    ]
    return torch.tensor(values)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Those of bfloat16, which tell NaN from nothing and -0 from 0."""
    return tensor.view(torch.int16)


@cache
def row_weight_and_sums(inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[inputs] and [37, inputs], random, and what the model says: half a second for the largest."""
    generator = torch.Generator().manual_seed(inputs)
    row = torch.randn(inputs, generator=generator).bfloat16().float()
    weight = torch.randn(37, inputs, generator=generator).bfloat16().float()
    return row, weight, models(row, weight)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("inputs", [5, 32, 63, 160])
@pytest.mark.parametrize("more", [2, GROUP])
def test_sums_have_the_order_of_the_instruction(rows: int, inputs: int, more: int) -> None:
    """Bit by bit: two more inputs take away what bfloat16 can show of a sum, so that the rest is seen."""
    filled = -(-inputs // GROUP) * GROUP
    row, weight = torch.zeros(filled + more), torch.zeros(37, filled + more)
    row[:inputs], weight[:, :inputs], sums = row_weight_and_sums(inputs)
    row[filled : filled + 2] = 1.0
    weight[:, filled] = -sums.bfloat16().float()
    weight[:, filled + 1] = -(sums + weight[:, filled]).bfloat16().float()
    rest = sums + weight[:, filled] + weight[:, filled + 1]
    assert inputs == 5 or rest.count_nonzero() > 25
    found = linear(row.bfloat16().expand(rows, -1), pack_weight(weight.bfloat16()))
    assert torch.equal(found.float(), rest.expand(rows, -1))


@pytest.mark.parametrize("rows", [1, 2, 19])
def test_denormals_are_zero_and_nothing_else_is(rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # Products are between 2^-140 and 2^-110. Two inputs have large ones, but with weights that are denormal.
    row = torch.randn(70, generator=generator) * 2.0**-60
    weight = torch.randn(50, 70, generator=generator) * torch.logspace(-76, -54, 50, base=2)[:, None]
    row[[6, 39]], weight[:, [6, 39]] = 2.0**20, 2.0**-128
    bias = torch.randn(50, generator=generator) * 2.0**-127
    row, weight, bias = row.bfloat16(), weight.bfloat16(), bias.bfloat16()
    expected = models(row, weight, bias).bfloat16()
    assert 10 < (expected == 0).sum() < 40
    exact = row.double() @ weight.double().T
    assert exact.abs().min() > 2**-120 and bias.count_nonzero() == 50
    found = linear(row.expand(rows, -1), pack_weight(weight), bias)
    assert torch.equal(found, expected.expand(rows, -1))


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_infinity_and_what_is_no_number(rows: int) -> None:
    inf, nan = math.inf, math.nan
    row = torch.tensor([1.0, inf, 2.0**127, 2.0**127, -1.0]).bfloat16()
    weight = torch.tensor(
        [
            [1, 0, 1, 0, 1],  # inf * 0
            [1, 2, 0, 0, 1],
            [1, -2, 0, 0, inf],  # inf - inf
            [0, 0, 0, 0, 0],
            [nan, 1, 1, 1, 1],
        ]
    ).bfloat16()
    large = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 2, 0, 0], [0, 0, 1, 0, -(2.0**126)], [3, 0, 0, 0, 1]])
    finite = row.clone()
    finite[1] = 0
    for values, weights in ((row, weight), (finite, large.bfloat16())):
        expected = models(values, weights).bfloat16()
        found = linear(values.expand(rows, -1), pack_weight(weights))
        torch.testing.assert_close(found, expected.expand(rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (70, 97), (1, 200), (96, 31)])
@pytest.mark.parametrize("biased", [False, True])
def test_bits_of_a_row_are_the_same_for_any_number_of_rows(outputs: int, inputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(300, inputs, generator=generator)
    x[5] *= 2.0**-126
    x[6, inputs // 2], x[37, 0], x[69, -1] = math.inf, -math.inf, math.nan
    weight = torch.randn(outputs, inputs, generator=generator)
    weight[0] *= 2.0**-60
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    rows, packed = x.bfloat16(), pack_weight(weight.bfloat16())
    alone = torch.cat([linear(row[None], packed, bias) for row in rows])
    assert alone.isnan().any() and alone.isinf().any()
    for count in (*range(2, 19), *range(31, 35), *range(63, 67), 257, 300):
        assert torch.equal(bits(linear(rows[:count], packed, bias)), bits(alone[:count])), count


def test_rows_that_are_anywhere_in_memory() -> None:
    """Those of an expert: there is no distance between them at which tiles could be loaded."""
    case = Case(40, 4, 2, 32, 64)
    assert torch.equal(case.run(), case.one_by_one())


def test_nothing_is_left_of_rows_before() -> None:
    """Rows with a last group that is not full are copied, to where there was something else."""
    weight = torch.randn(16, 33).bfloat16()
    x = torch.randn(5, 33).bfloat16()
    before = linear(x, pack_weight(weight))
    linear(torch.full((5, 63), math.nan).bfloat16(), pack_weight(torch.ones(16, 63).bfloat16()))
    assert torch.equal(linear(x, pack_weight(weight)), before)


def test_denormals_are_computed_with_as_before_afterwards() -> None:
    linear(torch.ones(3, 32).bfloat16(), pack_weight(torch.ones(16, 32).bfloat16()))
    assert torch.tensor(2.0**-120).mul(2.0**-10).item() == 2.0**-130
