"""The gates of feed-forward blocks by the CPU's kernels, torch and the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from kernels.cpu import library
from kernels.gated_activation import (
    OF_THE_GATE,
    Activation,
    gated_activation,
    gated_activation_reference,
    sigmoid,
)
from tests.kernels.conftest import NEEDS_TRITON
from tests.kernels.cuda.poison import assert_rounded, far_apart, surrounded
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.references import activated64, assert_close, factor64, gate_loss

NAMES_OF_TRANSFORMERS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
EACH = pytest.mark.parametrize("activation", OF_THE_GATE)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
TRITON = pytest.param("triton", marks=NEEDS_TRITON)
# Columns of a program of the CUDA kernel.
BLOCK = 1024
Gate = Callable[[torch.Tensor, str], torch.Tensor]


def on_cpu(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    return gated_activation(surrounded(gate_up, "cpu"), activation)  # type: ignore[arg-type]


@pytest.fixture(params=[TRITON, "cpu"])
def gate_of(request: pytest.FixtureRequest, device: str) -> Gate:
    """Applies a gate with the CUDA kernel, or on the CPU, to rows with NaN around them."""
    if request.param == "cpu":
        return on_cpu
    from kernels.cuda import gated_activation as cuda

    assert cuda.BLOCK == BLOCK
    return lambda gate_up, activation: cuda.gated_activation(surrounded(gate_up, device), activation).cpu()


def random(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)).mul(2).to(dtype)


def exact(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return activated64(gate, activation) * factor64(up, activation)


@pytest.mark.parametrize("activation", [*OF_THE_GATE, "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(0, 32), (1, 1), (9, 96), (2, BLOCK + 8)])
def test_is_accurate(tokens: int, width: int, dtype: torch.dtype, activation: str, gate_of: Gate) -> None:
    gate_up = random(tokens, width, dtype)
    before = gate_up.clone()
    actual = gate_of(gate_up, activation)
    assert actual.shape == (tokens, width) and actual.dtype == dtype and torch.equal(gate_up, before)
    if dtype is torch.float32 and tokens:
        assert_close(actual, exact(gate_up, activation), gate_loss(gate_up[:, :width], activation))
    elif tokens and gate_of is not on_cpu:  # torch cancels digits where gelu is almost zero: see the next
        assert_rounded(actual, exact(gate_up, activation), roundings=2)  # the activation, and its product


@EACH
@HALVES
def test_is_rounded_before_the_product(dtype: torch.dtype, activation: str, gate_of: Gate) -> None:
    gate_up = random(8, 4096, dtype) / 2
    gate, up = gate_up.chunk(2, dim=-1)
    expected = activated64(gate, activation).to(dtype) * up
    actual = gate_of(gate_up, activation)
    # Where the activation is within the last bits of float32 of the middle of two values, it may be rounded
    # either way: by eps of it. Each side is rounded once more, by eps / 2 at most, or half the least number.
    # That happens to one value in thousands. Some kernels add one to a tangent or an error function that is
    # almost -1, and may be off by 2^-23 of the gate there.
    info = torch.finfo(dtype)
    rtol, atol = (1 + info.eps) * (1 + info.eps / 2) / (1 - info.eps / 2) - 1, info.smallest_normal * info.eps
    if activation != "silu":
        atol += (gate * up).abs().max().item() * 2**-23
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    assert (actual != expected).sum() <= 0.01 * expected.numel()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes(dtype: torch.dtype, activation: Activation) -> None:
    gate = torch.tensor([-3e38, -200.0, -90.0, -0.0, 0.0, 90.0, 3e38, float("nan"), float("inf")])
    if activation == "gelu" and not library.available():
        # torch computes it with oneDNN, which from AVX-512 on doubles a number before it halves it.
        gate = gate[~(gate.abs() > torch.finfo(dtype).max / 2)]
    actual = gated_activation(torch.cat([gate, torch.ones_like(gate)])[None].to(dtype), activation)[0]
    expected = functional.silu(gate.to(dtype))  # all of them agree so far out
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-36, rtol=2 * torch.finfo(dtype).eps)


@EACH
@pytest.mark.parametrize("gate_of", [TRITON], indirect=True)
def test_large_gates_saturate_on_a_gpu(activation: str, gate_of: Gate) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -80.0, 0.0, 80.0, 200.0, 1e4, 3e38, *[1.0] * 8]])
    expected = exact(gate_up, "silu")  # so far out they agree
    # Divisions on the GPU are good to two units in the last place; what is tiny may become zero.
    torch.testing.assert_close(gate_of(gate_up, activation).double(), expected, rtol=2.0**-22, atol=1e-6)


@pytest.mark.skipif(
    not library.available(), reason="needs compiled kernels, and so avx2: torch cancels digits"
)
@EACH
def test_small_values_are_accurate_too(activation: Activation) -> None:
    """Where an activation is almost zero, its relative error is what its gate allows, and no more."""
    gate = torch.linspace(-9, 0, 1001)
    actual = gated_activation(torch.cat([gate, torch.ones(1001)])[None], activation)[0]
    wanted = activated64(gate, activation)
    loss = torch.tensor([gate_loss(each, activation) for each in gate])
    assert ((actual.double() - wanted).abs() <= loss * wanted.abs() + 1e-38).all()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_is_bitwise_that_of_transformers(dtype: torch.dtype, activation: Activation) -> None:
    gate_up = random(3, 1030, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = ACT2FN[NAMES_OF_TRANSFORMERS[activation]](gate) * up
    assert torch.equal(gated_activation_reference(gate_up, activation), expected)


def test_a_clamped_gate_keeps_nan_and_infinity(gate_of: Gate) -> None:
    """As the reference, which tests/workers/test_gpt_oss.py compares with transformers."""
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 7.0, -7.0, 1.0])
    gate_up = torch.cartesian_prod(values, values).T.reshape(1, -1)
    expected = gated_activation_reference(gate_up, "clamped_swiglu")
    torch.testing.assert_close(gate_of(gate_up, "clamped_swiglu"), expected, equal_nan=True)


@NEEDS_TRITON
def test_rows_beyond_32_bits(device: str) -> None:
    from kernels.cuda import gated_activation as cuda

    gate_up = random(3, 32, torch.bfloat16)
    near = cuda.gated_activation(gate_up.to(device), "silu")
    assert torch.equal(cuda.gated_activation(far_apart(gate_up, device), "silu"), near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_squared_relu_has_no_gate(dtype: torch.dtype) -> None:
    """Both operations are exact but for one rounding."""
    up = random(9, BLOCK // 2 + 8, dtype)
    up[3, 5], up[4, 6] = float("nan"), -float("inf")
    squares = up.double().clamp(min=0).square().to(dtype)
    torch.testing.assert_close(on_cpu(up, "relu2"), squares, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sigmoid_has_the_same_bits_wherever_it_is(dtype: torch.dtype) -> None:
    """Torch's has others at the end of a tensor."""
    need_compiled()
    x = torch.cat((torch.linspace(-90, 90, 1000), torch.tensor([torch.nan, torch.inf, -torch.inf]))).to(dtype)
    found = sigmoid(x[None])[0]
    alone = torch.cat([sigmoid(one[None, None])[0] for one in x])
    assert torch.equal(alone.nan_to_num(2), found.nan_to_num(2))
    exact = torch.sigmoid(x.double())
    # The argument of the exponential function is rounded, and log2(e), by which x is multiplied for it.
    units = 2**-24 * (4 + 2 * x.double().nan_to_num(0, 0, 0).abs()) + (
        2**-8 if dtype is torch.bfloat16 else 0
    )
    assert torch.equal(found.isnan(), x.isnan())
    assert ((found.double() - exact).abs() <= 1e-37 + units * exact)[~x.isnan()].all()
