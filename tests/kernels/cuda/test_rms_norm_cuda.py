"""RMSNorm on the GPU or in the interpreter, against float64 and against the roundings of the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, surrounded
from tests.kernels.references import rms_norm64

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
EPS = 1e-5
ROUNDINGS = 2  # of the normalised row, and of its product with the weight


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 1024), (2, 5120)])
def test_rows_are_accurate(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    actual = rms_norm(surrounded(x, device), weight.to(device), EPS)
    assert actual.shape == x.shape and actual.dtype == dtype
    assert_rounded(actual, rms_norm64(x, weight, EPS), ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(3, 5, 128), (2, 3, 80), (1, 1, 64)])
def test_heads_are_accurate(
    tokens: int, heads: int, width: int, per_head: bool, dtype: torch.dtype, device: str
) -> None:
    x = random(tokens, heads, width, dtype=dtype)
    weight = random(*((heads, width) if per_head else (width,)), dtype=dtype, seed=1)
    # The heads are a part of wider rows, as the queries of a fused projection are.
    view = surrounded(x.flatten(1), device).view(tokens, heads, width)
    actual = rms_norm(view, weight.to(device), EPS)
    assert actual.is_contiguous()
    assert_rounded(actual, rms_norm64(x, weight, EPS), ROUNDINGS)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_where_the_reference_does(dtype: torch.dtype, device: str) -> None:
    x, weight = random(8, 4096, dtype=dtype), random(4096, dtype=dtype, seed=1)
    actual = rms_norm(x.to(device), weight.to(device), EPS)
    assert_same_roundings(actual, rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_weight_is_not_preceded_by_a_rounding(dtype: torch.dtype, device: str) -> None:
    x, weight = random(8, 4096, dtype=dtype), random(4096, dtype=torch.float32, seed=1)
    actual = rms_norm(x.to(device), weight.to(device), EPS)
    assert actual.dtype == dtype
    assert_rounded(actual, rms_norm64(x, weight, EPS), roundings=1)
    assert_same_roundings(actual, rms_norm_reference(x, weight, EPS))
    zeros = torch.zeros_like(x, device=device)
    assert torch.equal(add_rms_norm(x.to(device), zeros, weight.to(device), EPS), actual)
    by_head = random(32, 128, dtype=torch.float32, seed=2)
    actual = rms_norm(x.view(8, 32, 128).to(device), by_head.to(device), EPS)
    assert_rounded(actual, rms_norm64(x.view(8, 32, 128), by_head, EPS), roundings=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 1024)])
def test_add_and_norm(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    total = residual + x
    on_device = surrounded(residual, device)
    whole = on_device._base
    assert whole is not None
    actual = add_rms_norm(surrounded(x, device), on_device, weight.to(device), EPS)
    assert torch.equal(on_device.cpu(), total)
    assert int(whole.isnan().sum()) == whole.numel() - total.numel(), "written beside the residual"
    assert_rounded(actual, rms_norm64(total, weight, EPS), ROUNDINGS)


@pytest.mark.parametrize("dtype", HALVES)
def test_add_rounds_where_the_reference_does(dtype: torch.dtype, device: str) -> None:
    x, residual = random(8, 4096, dtype=dtype), random(8, 4096, dtype=dtype, seed=1)
    weight = random(4096, dtype=dtype, seed=2)
    on_device = residual.to(device, copy=True)
    actual = add_rms_norm(x.to(device), on_device, weight.to(device), EPS)
    assert_same_roundings(actual, add_rms_norm_reference(x, residual, weight, EPS))
    assert torch.equal(on_device.cpu(), residual)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rows(scale: float, device: str) -> None:
    """Zeros stay zeros; squares that float16 cannot hold are no obstacle."""
    x, weight = random(2, 128, dtype=torch.float32).mul(scale).half(), torch.ones(128).half()
    actual = rms_norm(x.to(device), weight.to(device), 1e-12)
    assert_rounded(actual, rms_norm64(x, weight, 1e-12), ROUNDINGS)


def test_no_rows(device: str) -> None:
    empty, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert rms_norm(empty, weight, EPS).shape == (0, 64)
    assert rms_norm(empty.view(0, 2, 32), weight[:32], EPS).shape == (0, 2, 32)
    assert add_rms_norm(empty, empty.clone(), weight, EPS).shape == (0, 64)


def test_rows_beyond_32_bits(device: str) -> None:
    x, weight = random(3, 64, dtype=torch.bfloat16), torch.ones(64).bfloat16()
    far = far_apart(x, device)
    expected = rms_norm(x.to(device), weight.to(device), EPS)
    assert torch.equal(rms_norm(far, weight.to(device), EPS), expected)
    zeros = torch.zeros_like(x, device=device)
    assert torch.equal(add_rms_norm(zeros, far, weight.to(device), EPS), expected)
    assert torch.equal(far.cpu(), x)
