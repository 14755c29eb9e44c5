"""The projections of batch-invariant models, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.cuda.linear import linear, splits_for
from tests.families import paired
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.poison import surrounded
from tests.kernels.test_linear import sum_loss

DTYPES = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "biased", "dtype"),
    paired(
        [
            (rows, *of)
            for of in ((128, 64, False), (140, 130, True), (1, 1, True), (70, 1100, False))
            for rows in (1, 150)
        ],
        [*DTYPES],
        mark=SELDOM,
    ),
)
def test_as_in_float64(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype, device: str
) -> None:
    """What is beside the rows in memory is not read, nor what is behind the weight and the bias."""
    generator = torch.Generator().manual_seed(rows + outputs)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    memory = torch.full(((outputs + 1) * (inputs + 1),), torch.nan, dtype=dtype, device=device)
    placed = memory[: outputs * inputs].view(outputs, inputs).copy_(weight)
    other = memory[outputs * inputs :][:outputs].copy_(bias) if biased else None
    expected = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    actual = linear(surrounded(x, device), placed, other)
    assert actual.dtype is dtype
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=DTYPES[dtype], atol=sum_loss(inputs) + 2**-25
    )


def test_few_rows_have_enough_programs_to_read_a_weight() -> None:
    """Of an 8B; and the parts go by the weight alone."""
    for outputs, inputs in ((4096, 4096), (4096, 12_288), (6144, 4096), (24_576, 4096), (151_936, 4096)):
        splits = splits_for(torch.bfloat16, outputs, inputs)
        assert outputs // 128 * splits >= 128 and -(-inputs // 64) >= 4 * splits
    assert splits_for(torch.bfloat16, 24_576, 4096) == 1
