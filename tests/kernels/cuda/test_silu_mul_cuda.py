"""The SwiGLU gate on the GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.silu_mul import BLOCK, silu_mul
from kernels.silu_mul import silu_mul_reference
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, surrounded
from tests.kernels.references import assert_close, gate_loss

torch.set_num_threads(1)

HALVES = [torch.bfloat16, torch.float16]


def random(tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(width)).mul(2).to(dtype)


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 96), (2, BLOCK), (2, BLOCK + 8), (1, 3 * BLOCK)])
def test_is_accurate(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = random(tokens, width, dtype)
    on_device = surrounded(gate_up, device)
    actual = silu_mul(on_device)
    assert actual.shape == (tokens, width) and actual.dtype == dtype
    assert torch.equal(on_device.cpu(), gate_up)
    if dtype is torch.float32:
        assert_close(actual.cpu(), exact(gate_up), gate_loss(gate_up[:, :width]))
    else:
        assert_rounded(actual, exact(gate_up), roundings=2)  # of silu, and of its product with up


@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_where_the_reference_does(dtype: torch.dtype, device: str) -> None:
    gate_up = random(8, 4096, dtype)
    assert_same_roundings(silu_mul(gate_up.to(device)), silu_mul_reference(gate_up))


def test_large_gates_saturate(device: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -80.0, 0.0, 80.0, 200.0, 1e4, 3e38])
    gate_up = torch.cat([gate, torch.ones(8)])[None]
    actual = silu_mul(gate_up.to(device)).cpu()
    # Divisions on the GPU are good to two units in the last place; what is tiny may become zero.
    torch.testing.assert_close(actual.double(), exact(gate_up), rtol=2.0**-22, atol=1e-6)


def test_no_rows(device: str) -> None:
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


def test_rows_beyond_32_bits(device: str) -> None:
    gate_up = random(3, 32, torch.bfloat16)
    assert torch.equal(silu_mul(far_apart(gate_up, device)), silu_mul(gate_up.to(device)))
