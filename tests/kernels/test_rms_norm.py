"""RMSNorm by the CPU's kernels, torch and the CUDA kernels, against float64 and transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels import rms_norm as wrapper
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from tests.kernels.conftest import NEEDS_TRITON
from tests.kernels.cuda.poison import assert_rounded, assert_same_roundings, far_apart, surrounded
from tests.kernels.references import assert_close, norm_loss, rms_norm64

HALVES = [torch.bfloat16, torch.float16]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
EPS = 1e-5
TRITON = pytest.param("triton", marks=NEEDS_TRITON)


@pytest.fixture(params=[TRITON, "cpu"])
def norms(request: pytest.FixtureRequest, device: str) -> SimpleNamespace:
    """`rms_norm` and `add_rms_norm` of the CUDA kernels, or of the CPU, and the device of their tensors."""
    if request.param == "cpu":
        return SimpleNamespace(plain=rms_norm, add=add_rms_norm, device="cpu")
    from kernels.cuda import rms_norm as cuda

    return SimpleNamespace(plain=cuda.rms_norm, add=cuda.add_rms_norm, device=device)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_normed(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, roundings: int = 2) -> None:
    """The roundings are of the normalised row, and of its product with the weight."""
    exact = rms_norm64(x, weight, EPS)
    if actual.dtype is torch.float32:
        assert_close(actual.cpu(), exact, norm_loss(x.shape[-1]))
    else:
        assert_rounded(actual, exact, roundings)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 1024), (2, 5120)])
def test_rows_are_accurate(shape: tuple[int, int], dtype: torch.dtype, norms: SimpleNamespace) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    actual = norms.plain(surrounded(x, norms.device), weight.to(norms.device), EPS)
    assert actual.shape == x.shape and actual.dtype == dtype
    assert_normed(actual, x, weight)


@DTYPES
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(3, 5, 128), (2, 3, 80), (1, 1, 64)])
def test_heads_are_accurate(
    tokens: int, heads: int, width: int, per_head: bool, dtype: torch.dtype, norms: SimpleNamespace
) -> None:
    x = random(tokens, heads, width, dtype=dtype)
    weight = random(*((heads, width) if per_head else (width,)), dtype=dtype, seed=1)
    # The heads are a part of wider rows, as the queries of a fused projection are.
    view = surrounded(x.flatten(1), norms.device).view(tokens, heads, width)
    actual = norms.plain(view, weight.to(norms.device), EPS)
    assert actual.is_contiguous()
    assert_normed(actual, x, weight)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounds_where_the_reference_does(dtype: torch.dtype, norms: SimpleNamespace) -> None:
    x, weight = random(8, 4096, dtype=dtype), random(4096, dtype=dtype, seed=1)
    actual = norms.plain(x.to(norms.device), weight.to(norms.device), EPS)
    assert_same_roundings(actual, rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_weight_is_not_preceded_by_a_rounding(dtype: torch.dtype, norms: SimpleNamespace) -> None:
    x, weight = random(8, 4096, dtype=dtype), random(4096, dtype=torch.float32, seed=1)
    actual = norms.plain(x.to(norms.device), weight.to(norms.device), EPS)
    assert actual.dtype == dtype
    assert_normed(actual, x, weight, roundings=1)
    assert_same_roundings(actual, rms_norm_reference(x, weight, EPS))
    zeros = torch.zeros_like(x, device=norms.device)
    added = norms.add(x.to(norms.device), zeros, weight.to(norms.device), EPS)
    assert_same_roundings(added, actual.cpu())
    by_head = random(32, 128, dtype=torch.float32, seed=2)
    actual = norms.plain(x.view(8, 32, 128).to(norms.device), by_head.to(norms.device), EPS)
    assert_normed(actual, x.view(8, 32, 128), by_head, roundings=1)


@DTYPES
@pytest.mark.parametrize("shape", [(6, 1), (6, 15), (1, 64), (5, 80), (3, 1024)])
def test_add_and_norm(shape: tuple[int, int], dtype: torch.dtype, norms: SimpleNamespace) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    total = residual + x
    on_device = surrounded(residual, norms.device)
    whole = on_device._base
    assert whole is not None
    actual = norms.add(surrounded(x, norms.device), on_device, weight.to(norms.device), EPS)
    assert torch.equal(on_device.cpu(), total)
    assert int(whole.isnan().sum()) == whole.numel() - total.numel(), "written beside the residual"
    assert_normed(actual, total, weight)


@pytest.mark.parametrize("dtype", HALVES)
def test_add_rounds_where_the_reference_does(dtype: torch.dtype, norms: SimpleNamespace) -> None:
    x, residual = random(8, 4096, dtype=dtype), random(8, 4096, dtype=dtype, seed=1)
    weight = random(4096, dtype=dtype, seed=2)
    on_device = residual.to(norms.device, copy=True)
    actual = norms.add(x.to(norms.device), on_device, weight.to(norms.device), EPS)
    assert_same_roundings(actual, wrapper.add_rms_norm_reference(x, residual, weight, EPS))
    assert torch.equal(on_device.cpu(), residual)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_extreme_rows(scale: float, norms: SimpleNamespace) -> None:
    """Zeros stay zeros; squares that float16 cannot hold are no obstacle."""
    x, weight = random(2, 128, dtype=torch.float32).mul(scale).half(), torch.ones(128).half()
    actual = norms.plain(x.to(norms.device), weight.to(norms.device), 1e-12)
    assert_rounded(actual, rms_norm64(x, weight, 1e-12), 2)


def test_no_rows(norms: SimpleNamespace) -> None:
    empty, weight = torch.empty(0, 64, device=norms.device), torch.ones(64, device=norms.device)
    assert norms.plain(empty, weight, EPS).shape == (0, 64)
    assert norms.plain(empty.view(0, 2, 32), weight[:32], EPS).shape == (0, 2, 32)
    assert norms.add(empty, empty.clone(), weight, EPS).shape == (0, 64)


@pytest.mark.parametrize("norms", [TRITON], indirect=True)
def test_rows_beyond_32_bits(norms: SimpleNamespace) -> None:
    x, weight = random(3, 64, dtype=torch.bfloat16), torch.ones(64).bfloat16().to(norms.device)
    far = far_apart(x, norms.device)
    expected = norms.plain(x.to(norms.device), weight, EPS)
    assert torch.equal(norms.plain(far, weight, EPS), expected)
    assert torch.equal(norms.add(torch.zeros_like(x, device=norms.device), far, weight, EPS), expected)
    assert torch.equal(far.cpu(), x)


@DTYPES
@pytest.mark.parametrize("shape", [(0, 8), (1, 64), (5, 1024), (3, 6, 80)])
def test_the_formula_is_bitwise_as_in_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A weight of the dtype of x as in Qwen3; a float32 one is rounded once, as in Gemma and Olmo."""
    x, weight = random(*shape, dtype=torch.float32).mul(3).to(dtype), random(shape[-1], dtype=dtype, seed=1)
    theirs = [kind(shape[-1], eps=1e-6) for kind in (Qwen3RMSNorm, Gemma3RMSNorm, Olmo2RMSNorm)]
    for norm, ours in zip(theirs, (weight, 1.0 + weight.float(), weight.float()), strict=True):
        norm.to(dtype).weight.data.copy_(weight)
        with torch.inference_mode():
            assert torch.equal(rms_norm_reference(x, ours, 1e-6), norm(x))
