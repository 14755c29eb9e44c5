"""RMSNorm against float64 and, for the order of its casts, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.references import assert_close, norm_loss, rms_norm64

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 64), (5, 1024), (3, 6, 80)])
def test_bitwise_as_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).mul(3).to(dtype)
    norm = Qwen3RMSNorm(shape[-1], eps=1e-6).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    norm.weight.data.copy_(weight)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, weight, 1e-6), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 1024), (3, 6, 80)])
def test_a_float32_weight_is_rounded_once_as_in_gemma_and_olmo(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).mul(3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    gemma, olmo = Gemma3RMSNorm(shape[-1], eps=1e-6), Olmo2RMSNorm(shape[-1], eps=1e-6)
    for norm in (gemma, olmo):
        norm.to(dtype).weight.data.copy_(weight)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, 1.0 + weight.float(), 1e-6), gemma(x))
        assert torch.equal(rms_norm(x, weight.float(), 1e-6), olmo(x))


def test_float32_is_accurate() -> None:
    x, weight = torch.randn(7, 512), torch.randn(512)
    assert_close(rms_norm(x, weight, 1e-6), rms_norm64(x, weight, 1e-6), norm_loss(512))


def test_a_weight_per_head() -> None:
    x, weight = torch.randn(4, 3, 32), torch.randn(3, 32)
    whole = rms_norm(x, weight, 1e-6)
    for head in range(3):
        assert torch.equal(whole[:, head], rms_norm(x[:, head].contiguous(), weight[head], 1e-6))


def test_a_strided_view_is_read_correctly() -> None:
    packed = torch.randn(4, 5, 32)
    view = packed[:, 1:3]
    assert torch.equal(
        rms_norm(view, torch.ones(32), 1e-6), rms_norm(view.contiguous(), torch.ones(32), 1e-6)
    )


@pytest.mark.parametrize("width", [1, 15, 96, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_is_add_then_norm(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((6, width), (6, width), (width,)))
    total = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    if dtype is torch.float32:
        assert_close(normed, rms_norm64(total, weight, 1e-5), norm_loss(width))
        return
    # Sums of squares may be added up in another order, which can move the rounding before the weight by one
    # place: by eps of the value. Each side is rounded after it, by eps / 2 at most, or half the least number.
    info = torch.finfo(dtype)
    rtol, atol = (1 + info.eps) * (1 + info.eps / 2) / (1 - info.eps / 2) - 1, info.smallest_normal * info.eps
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5), rtol=rtol, atol=atol)


@pytest.mark.parametrize("width", [1, 15, 96, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_add_with_a_float32_weight_rounds_once(dtype: torch.dtype, width: int) -> None:
    x, residual = (torch.randn(6, width).to(dtype) for _ in range(2))
    weight = torch.randn(width)
    total = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total) and normed.dtype is dtype
    assert_close(normed, rms_norm64(total, weight, 1e-5), norm_loss(width))
    # One value in hundreds is so close to the middle of two that float32 decides.
    exact = rms_norm64(total, weight, 1e-5).to(dtype)
    assert (normed != exact).sum() <= 1 + 0.01 * normed.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_reads_strided_rows_and_keeps_what_is_between(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(5, 100).to(dtype), torch.randn(40).to(dtype)
    residual = torch.randn(5, 64).to(dtype)
    expected = residual.clone()
    expected[:, :40] += wide[:, 30:70]
    normed = add_rms_norm(wide[:, 30:70], residual[:, :40], weight, 1e-6)
    assert torch.equal(residual, expected)
    again = add_rms_norm(torch.zeros(5, 40).to(dtype), expected[:, :40].contiguous(), weight, 1e-6)
    assert torch.equal(normed, again)


def test_no_rows() -> None:
    empty = torch.zeros(0, 32)
    assert add_rms_norm(empty, empty.clone(), torch.ones(32), 1e-6).shape == (0, 32)


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    with pytest.raises(ValueError, match="weight: shape"):
        rms_norm(x, weight[:16], 1e-6)
    with pytest.raises(TypeError, match="weight: must have the dtype"):
        rms_norm(x, weight.bfloat16(), 1e-6)
    with pytest.raises(TypeError, match="weight: must have the dtype"):
        add_rms_norm(x.bfloat16(), x.bfloat16(), weight.half(), 1e-6)
    with pytest.raises(TypeError, match="x: dtype"):
        rms_norm(x.long(), weight, 1e-6)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        rms_norm(torch.randn(32, 4).T, weight, 1e-6)
    with pytest.raises(ValueError, match="x: must have 2 or 3 dimensions"):
        rms_norm(weight, weight, 1e-6)
    with pytest.raises(ValueError, match="weight: must have fewer dimensions"):
        rms_norm(x, x, 1e-6)
    with pytest.raises(ValueError, match="residual: shape"):
        add_rms_norm(x, x[:2], weight, 1e-6)
