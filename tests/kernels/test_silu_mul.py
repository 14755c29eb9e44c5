"""The SwiGLU gate."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.silu_mul import silu_mul
from tests.kernels.references import assert_close

torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_float32_is_accurate(rows: int) -> None:
    gate_up = torch.randn(rows, 192)
    gate, up = gate_up.double().chunk(2, dim=-1)
    actual = silu_mul(gate_up)
    assert actual.shape == (rows, 96)
    if rows:
        assert_close(actual, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_as_the_unfused_model(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 64).to(dtype)
    before = gate_up.clone()
    assert torch.equal(silu_mul(gate_up), functional.silu(gate_up[:, :32].contiguous()) * gate_up[:, 32:])
    assert torch.equal(gate_up, before)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="gate_up: width must be even"):
        silu_mul(torch.randn(2, 5))
    with pytest.raises(ValueError, match="gate_up: shape"):
        silu_mul(torch.randn(2, 5, 4))
