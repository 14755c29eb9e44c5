"""The gates of feed-forward blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from kernels.cpu import library
from kernels.gated_activation import (
    ACTIVATIONS,
    Activation,
    gated_activation,
    gated_activation_reference,
)
from tests.kernels.references import activated64, assert_close, gate_loss

torch.set_num_threads(1)

NAMES_OF_TRANSFORMERS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_float32_is_accurate(rows: int, activation: Activation) -> None:
    gate_up = torch.randn(rows, 192)
    gate, up = gate_up.double().chunk(2, dim=-1)
    actual = gated_activation(gate_up, activation)
    assert actual.shape == (rows, 96)
    if rows:
        assert_close(actual, activated64(gate, activation) * up, gate_loss(gate, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_is_bitwise_that_of_transformers(dtype: torch.dtype, activation: Activation) -> None:
    gate_up = torch.randn(3, 2060).mul(2).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = ACT2FN[NAMES_OF_TRANSFORMERS[activation]](gate) * up
    assert torch.equal(gated_activation_reference(gate_up, activation), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 32, 1030])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_before_the_product(
    dtype: torch.dtype, width: int, activation: Activation
) -> None:
    gate_up = torch.randn(5, 2 * width).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up[:, :width], gate_up[:, width:]
    expected = activated64(gate, activation).to(dtype) * up
    # Where the activation is within the last bits of float32 of the middle of two values, it may be rounded
    # either way: by eps of it. Each side is rounded once more, by eps / 2 at most, or half the least number.
    # That happens to one value in thousands. torch, which stands in for a kernel that is not there, adds one
    # to a tangent or an error function that is almost -1, and may be off by 2^-23 of the gate there.
    info = torch.finfo(dtype)
    rtol, atol = (1 + info.eps) * (1 + info.eps / 2) / (1 - info.eps / 2) - 1, info.smallest_normal * info.eps
    if activation != "silu":
        atol += (gate * up).abs().max().item() * 2**-23
    torch.testing.assert_close(gated_activation(gate_up, activation), expected, rtol=rtol, atol=atol)
    assert (gated_activation(gate_up, activation) != expected).sum() <= 1 + 0.01 * expected.numel()
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes(dtype: torch.dtype, activation: Activation) -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, -0.0, 0.0, 90.0, 3e38, float("nan"), float("inf")])
    if activation == "gelu" and not library.available():
        # torch computes it with oneDNN, which from AVX-512 on doubles a number before it halves it.
        gate = gate[~(gate.abs() > torch.finfo(dtype).max / 2)]
    actual = gated_activation(torch.cat([gate, torch.ones_like(gate)])[None].to(dtype), activation)[0]
    expected = functional.silu(gate.to(dtype))  # all of them agree so far out
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-36, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.skipif(
    not library.available(), reason="needs compiled kernels, and so avx2: torch cancels digits"
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_small_values_are_accurate_too(activation: Activation) -> None:
    """Where an activation is almost zero, its relative error is what its gate allows, and no more."""
    gate = torch.linspace(-9, 0, 1001)
    actual = gated_activation(torch.cat([gate, torch.ones(1001)])[None], activation)[0]
    exact = activated64(gate, activation)
    loss = torch.tensor([gate_loss(each, activation) for each in gate])
    assert ((actual.double() - exact).abs() <= loss * exact.abs() + 1e-38).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_strided_rows(activation: Activation) -> None:
    wide = torch.randn(4, 100)
    expected = gated_activation(wide[:, 10:90].contiguous(), activation)
    assert torch.equal(gated_activation(wide[:, 10:90], activation), expected)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="gate_up: width must be even"):
        gated_activation(torch.randn(2, 5))
    with pytest.raises(ValueError, match="gate_up: shape"):
        gated_activation(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match="activation: must be one of silu, gelu_tanh, gelu, got 'relu'"):
        gated_activation(torch.randn(2, 4), "relu")  # type: ignore[arg-type]
