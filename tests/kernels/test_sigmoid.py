"""Sigmoids by the CPU's kernel: accurate, and each by itself has the bits that it has beside others."""

from __future__ import annotations

import pytest
import torch

from kernels.sigmoid import sigmoid
from tests.kernels.instruction_sets import need_compiled


# In float32 the power of two that is exp(-|x|) for |x| < 22 is rounded, and with it exp, by 2^-20.
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2**-19), (torch.bfloat16, 2**-8)])
def test_an_element_has_the_same_bits_beside_others(dtype: torch.dtype, error: float) -> None:
    need_compiled()
    torch.manual_seed(0)
    x = torch.randn(41, 50).mul(4).to(dtype)
    found, exact = sigmoid(x), torch.sigmoid(x.double())
    assert ((found - exact).abs() <= error * exact).all()
    for row in range(len(x)):
        assert torch.equal(sigmoid(x[row, row:]), found[row, row:])
    assert torch.equal(sigmoid(x[:, 3:7]), found[:, 3:7])


def test_what_is_not_finite() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), -1e4, 1e4])
    torch.testing.assert_close(sigmoid(x), torch.tensor([1.0, 0.0, float("nan"), 0.0, 1.0]), equal_nan=True)
