"""Weights of 8-bit floats: what they hold, and the bits of products, from the definition of their sums."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.float8_weight import Float8Format, Float8Weight
from kernels.linear import linear
from tests.kernels.instruction_sets import need_compiled

# Outputs and inputs that fill the last blocks and that do not; and the inputs of a scale.
SHAPES = [(96, 64, 0), (33, 80, 32), (1, 48, 0), (40, 31, 0), (130, 300, 128), (17, 1, 0), (70, 2048, 64)]


def every_byte(outputs: int, inputs: int) -> torch.Tensor:
    """Values [O, I] of all bytes but the two NaN."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    values = torch.randint(0, 254, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return (values + (values >= 127).to(torch.uint8)).view(torch.float8_e4m3fn)


def made(
    outputs: int, inputs: int, scale_inputs: int, dtype: torch.dtype
) -> tuple[Float8Weight, torch.Tensor]:
    """A weight, which was written in parts, and what it is to be: torch's own reading of its values."""
    values = every_byte(outputs, inputs)
    empty = lambda size: torch.full((size,), 0xFF, dtype=torch.uint8)  # noqa: E731 - NaN in all that is not written
    weight = Float8Weight(outputs, inputs, dtype, Float8Format(scale_inputs), empty)
    scales = torch.rand(outputs, weight.num_scales) * 2 - 0.7
    for first in range(0, outputs, 13):
        largest = weight.write_values(first, values[first : first + 13], scales[first : first + 13])
        assert largest.isfinite().all()
    spread = scales.repeat_interleave(scale_inputs or inputs, 1)[:, :inputs]
    return weight, (values.float() * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "scale_inputs"), SHAPES)
def test_it_holds_what_was_written(outputs: int, inputs: int, scale_inputs: int, dtype: torch.dtype) -> None:
    weight, expected = made(outputs, inputs, scale_inputs, dtype)
    assert torch.equal(weight.dense(), expected) and weight.dense().dtype is dtype
    chosen = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(weight.rows(chosen), expected[chosen])


@pytest.mark.parametrize("rows", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs", "scale_inputs"), SHAPES)
def test_a_product_has_the_bits_of_its_definition(
    outputs: int, inputs: int, scale_inputs: int, dtype: torch.dtype, rows: int
) -> None:
    need_compiled()
    weight, dense = made(outputs, inputs, scale_inputs, dtype)
    scales = weight.scales.transpose(1, 2).flatten(0, 1)[:outputs]  # [O, S]
    x = torch.randn(rows, inputs + 96).to(dtype)[:, 96:]  # strided
    sums = by_definition(x[:9], every_byte(outputs, inputs), scales, scale_inputs)
    for bias in (None, torch.randn(outputs).to(dtype)):
        found = linear(x, weight, bias)
        assert torch.equal(found[:9], (sums if bias is None else sums + bias.float()).to(dtype))
        assert torch.equal(found[-1:], linear(x[-1:], weight, bias))
        exact = x.double() @ dense.double().T + (0 if bias is None else bias.double())
        assert (found - exact).norm() < 0.01 * exact.norm()


def by_definition(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, scale_inputs: int
) -> torch.Tensor:
    """See kernels/cpu/float8_product.h; float32. Each product and sum is exact in float64, or nearly."""
    outputs, inputs = values.shape
    wide, rows = values.double(), x.double()
    span = math.gcd(scale_inputs, 128) if scale_inputs and scale_inputs < inputs else 128
    totals = torch.zeros(len(x), outputs, dtype=torch.float64)
    for first in range(0, inputs, span):
        order = [*range(first, min(first + span, inputs))]
        if x.dtype is torch.bfloat16:  # the odd one of a pair first
            order = sorted(order, key=lambda i: (i // 2, -i))
        sums = torch.zeros_like(totals)
        for i in order:
            sums = (rows[:, i, None] * wide[:, i] + sums).float().double()
        of_span = scales[:, first // scale_inputs if scale_inputs else 0].double()
        totals = (sums * of_span + totals).float().double()
    return totals.float()


def small() -> Float8Weight:
    return Float8Weight(
        8, 32, torch.bfloat16, Float8Format(), lambda size: torch.empty(size, dtype=torch.uint8)
    )


def test_what_is_not_finite_is_seen() -> None:
    weight = small()
    values, scales = every_byte(8, 32), torch.ones(8, 1)
    for wrong in (torch.nan, torch.inf, 3e38):
        assert not weight.write_values(0, values, scales * wrong).isfinite().all()
    values.view(torch.uint8)[3, 5] = 0x7F
    assert not weight.write_values(0, values, scales).isfinite().all()
