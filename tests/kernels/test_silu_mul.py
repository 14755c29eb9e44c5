"""The SwiGLU gate."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.silu_mul import silu_mul
from tests.kernels.references import assert_close, gate_loss

torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_float32_is_accurate(rows: int) -> None:
    gate_up = torch.randn(rows, 192)
    gate, up = gate_up.double().chunk(2, dim=-1)
    actual = silu_mul(gate_up)
    assert actual.shape == (rows, 96)
    if rows:
        assert_close(actual, gate * torch.sigmoid(gate) * up, gate_loss(gate))


@pytest.mark.parametrize("width", [1, 32, 1030])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_as_the_unfused_model(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(5, 2 * width).to(dtype)
    before = gate_up.clone()
    expected = functional.silu(gate_up[:, :width].contiguous()) * gate_up[:, width:]
    # Where silu is within the last bits of float32 of the middle of two values, it may be rounded either way:
    # by eps of it. Each side is rounded once more, by eps / 2 at most, or half the least number. That happens
    # to one value in thousands.
    info = torch.finfo(dtype)
    rtol, atol = (1 + info.eps) * (1 + info.eps / 2) / (1 - info.eps / 2) - 1, info.smallest_normal * info.eps
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=rtol, atol=atol)
    assert (silu_mul(gate_up) != expected).sum() <= 1 + 0.01 * expected.numel()
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, -0.0, 0.0, 90.0, 3e38, float("nan"), float("inf")])
    actual = silu_mul(torch.cat([gate, torch.ones(9)])[None].to(dtype))[0]
    expected = functional.silu(gate.to(dtype))
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-36, rtol=2 * torch.finfo(dtype).eps)


def test_strided_rows() -> None:
    wide = torch.randn(4, 100)
    assert torch.equal(silu_mul(wide[:, 10:90]), silu_mul(wide[:, 10:90].contiguous()))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="gate_up: width must be even"):
        silu_mul(torch.randn(2, 5))
    with pytest.raises(ValueError, match="gate_up: shape"):
        silu_mul(torch.randn(2, 5, 4))
