"""The gates of feed-forward blocks on the GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.gated_activation import BLOCK, gated_activation
from kernels.gated_activation import ACTIVATIONS
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, surrounded
from tests.kernels.references import activated64, assert_close, gate_loss

torch.set_num_threads(1)

HALVES = [torch.bfloat16, torch.float16]


def random(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)).mul(2).to(dtype)


def exact(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return activated64(gate, activation) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 96), (2, BLOCK), (2, BLOCK + 8), (1, 3 * BLOCK)])
def test_is_accurate(tokens: int, width: int, dtype: torch.dtype, activation: str, device: str) -> None:
    gate_up = random(tokens, width, dtype)
    on_device = surrounded(gate_up, device)
    actual = gated_activation(on_device, activation)
    assert actual.shape == (tokens, width) and actual.dtype == dtype
    assert torch.equal(on_device.cpu(), gate_up)
    if dtype is torch.float32:
        lost = gate_loss(gate_up[:, :width], activation)
        assert_close(actual.cpu(), exact(gate_up, activation), lost)
    else:
        assert_rounded(actual, exact(gate_up, activation), roundings=2)  # the activation, and its product


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_is_rounded_before_the_product(dtype: torch.dtype, activation: str, device: str) -> None:
    gate_up = random(8, 4096, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    actual = gated_activation(gate_up.to(device), activation)
    assert_same_roundings(actual, activated64(gate, activation).to(dtype) * up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate(activation: str, device: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -80.0, 0.0, 80.0, 200.0, 1e4, 3e38])
    gate_up = torch.cat([gate, torch.ones(8)])[None]
    actual = gated_activation(gate_up.to(device), activation).cpu()
    expected = exact(gate_up, "silu")  # so far out they agree
    # Divisions on the GPU are good to two units in the last place; what is tiny may become zero.
    torch.testing.assert_close(actual.double(), expected, rtol=2.0**-22, atol=1e-6)


def test_no_rows(device: str) -> None:
    assert gated_activation(torch.empty(0, 64, device=device), "silu").shape == (0, 32)


def test_rows_beyond_32_bits(device: str) -> None:
    gate_up = random(3, 32, torch.bfloat16)
    near = gated_activation(gate_up.to(device), "silu")
    assert torch.equal(gated_activation(far_apart(gate_up, device), "silu"), near)
