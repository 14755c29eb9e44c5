"""QK-norm, rotation and the KV write in one operation, against the three one after the other."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import rope_kv_write as cpu
from kernels.rope import RopeSpec, rope_frequencies, rope_table
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from tests.kernels.references import angle_loss, assert_close, norm_loss, rms_norm64, rotate64

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGES, PAGE_SIZE, EPS = 3, 16, 1e-6
SPEC = RopeSpec(theta=10_000.0)


def projections(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Strided, as a part of something wider."""
    generator = torch.Generator().manual_seed(tokens + width)
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * width + 8, generator=generator)
    return wide.to(dtype)[:, 8:]


def pages(kv_heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Unused slots hold NaN."""
    shape = (PAGES, PAGE_SIZE, kv_heads, width)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("width", [8, 32, 80, 128, 256])
def test_float32_is_accurate(width: int, heads: int, kv_heads: int, *, normed: bool) -> None:
    positions, slots = [0, 1, 17, 63], [47, 0, 16, 15]
    qkv = projections(4, heads, kv_heads, width, torch.float32)
    weight = torch.randn(heads + kv_heads, width) if normed else None
    keys, values = pages(kv_heads, width, torch.float32)
    table = rope_table(SPEC, width, 64)
    query = rope_kv_write(qkv, weight, table[torch.tensor(positions)], torch.tensor(slots), keys, values, EPS)
    by_head = qkv.view(len(qkv), -1, width)
    turned = by_head[:, :-kv_heads].double()
    if weight is not None:
        turned = rms_norm64(turned, weight, EPS)
    exact = rotate64(turned, positions, rope_frequencies(SPEC, width)[0].tolist())
    lost = angle_loss(63) + (norm_loss(width) if normed else 0)
    assert_close(query, exact[:, :-kv_heads], lost)
    assert_close(keys.flatten(0, 1)[slots], exact[:, -kv_heads:], lost)
    assert torch.equal(values.flatten(0, 1)[slots], by_head[:, -kv_heads:])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("width", "turned"), [(8, 2), (80, 32), (96, 34), (128, 64), (128, None), (15, 6)])
def test_a_part_of_a_head_is_turned_and_all_of_it_normalised(
    width: int, turned: int | None, *, normed: bool
) -> None:
    positions, slots, kv_heads = [0, 1, 17, 63], [47, 0, 16, 15], 2
    qkv = projections(4, 4, kv_heads, width, torch.float32)
    weight = torch.randn(6, width) if normed else None
    keys, values = pages(kv_heads, width, torch.float32)
    # What lies beyond the rotation of a token is not read.
    cos_sin = None
    if turned is not None:
        cos_sin = torch.full((4, turned + 8), torch.nan)[:, :turned]
        cos_sin.copy_(rope_table(SPEC, turned, 64)[torch.tensor(positions)])
    query = rope_kv_write(qkv, weight, cos_sin, torch.tensor(slots), keys, values, EPS)
    by_head = qkv.view(len(qkv), -1, width)
    exact = by_head[:, :-kv_heads].double()
    if weight is not None:
        exact = rms_norm64(exact, weight, EPS)
    if turned is not None:
        frequencies = rope_frequencies(SPEC, turned)[0].tolist()
        exact[..., :turned] = rotate64(exact[..., :turned], positions, frequencies)
    lost = angle_loss(63) + (norm_loss(width) if normed else 0)
    assert_close(query, exact[:, :-kv_heads], lost)
    assert_close(keys.flatten(0, 1)[slots], exact[:, -kv_heads:], lost)
    assert torch.equal(values.flatten(0, 1)[slots], by_head[:, -kv_heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, "same"])
@pytest.mark.parametrize("turned", [None, 20, 48])
def test_as_the_operations_one_by_one(
    dtype: torch.dtype, index_dtype: torch.dtype, norm_dtype: torch.dtype | str | None, turned: int | None
) -> None:
    heads, kv_heads, width = 4, 2, 48
    qkv = projections(5, heads, kv_heads, width, dtype)
    weight = None
    if norm_dtype is not None:
        weight = torch.randn(heads + kv_heads, width)
        weight = weight.to(norm_dtype if isinstance(norm_dtype, torch.dtype) else dtype)
    cos_sin = None if turned is None else rope_table(SPEC, turned, 40)[torch.tensor([3, 0, 8, 39, 5])]
    slots = torch.tensor([0, 33, -1, 47, 16], dtype=index_dtype)
    actual, expected = pages(kv_heads, width, dtype), pages(kv_heads, width, dtype)
    query = rope_kv_write(qkv, weight, cos_sin, slots, *actual, EPS)
    wanted = rope_kv_write_reference(qkv, weight, cos_sin, slots, *expected, EPS)
    # Sums of squares may be added up in another order, which can move a rounding by one place; the rotation
    # adds two such values.
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(query, wanted, rtol=0, atol=bound * float(wanted.abs().max()))
    torch.testing.assert_close(
        actual[0], expected[0], rtol=0, atol=bound * float(wanted.abs().max()) * 2, equal_nan=True
    )
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[[0, 33, 47, 16]] = True
    for tensor in actual:
        assert tensor.flatten(0, 1)[~written].isnan().all(), "an unnamed slot was written"
        assert not tensor.flatten(0, 1)[written].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(dtype: torch.dtype) -> None:
    keys, values = pages(1, 16, dtype)
    qkv, slots = torch.zeros(0, 64, dtype=dtype), torch.zeros(0, dtype=torch.int64)
    assert rope_kv_write(qkv, None, torch.zeros(0, 16), slots, keys, values, EPS).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_beyond_the_pages_is_refused_and_nothing_written(dtype: torch.dtype) -> None:
    keys, values = pages(1, 16, dtype)
    qkv = projections(2, 2, 1, 16, dtype)
    with pytest.raises((IndexError, RuntimeError)):
        rope_kv_write(qkv, None, torch.ones(2, 16), torch.tensor([0, 48]), keys, values, EPS)
    if cpu.can_rope_kv_write(qkv, keys):
        assert keys.isnan().all() and values.isnan().all()


def test_wrong_arguments_are_named() -> None:
    keys, values = pages(1, 16, torch.float32)
    qkv, cos_sin, slots = torch.zeros(2, 64), torch.ones(2, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="qkv: 32 columns"):
        rope_kv_write(qkv[:, :32], None, cos_sin, slots, keys, values, EPS)
    with pytest.raises(ValueError, match="qk_norm: shape"):
        rope_kv_write(qkv, torch.ones(2, 16), cos_sin, slots, keys, values, EPS)
    with pytest.raises(ValueError, match="cos_sin: shape"):
        rope_kv_write(qkv, None, cos_sin[:1], slots, keys, values, EPS)
    for turned in (0, 3, 18):
        with pytest.raises(ValueError, match=f"cos_sin: width must be even .* 16, got {turned}"):
            rope_kv_write(qkv, None, torch.ones(2, turned), slots, keys, values, EPS)
    with pytest.raises(TypeError, match="qk_norm: must have the dtype"):
        rope_kv_write(qkv, torch.ones(3, 16).bfloat16(), cos_sin, slots, keys, values, EPS)
    with pytest.raises(TypeError, match="slots: dtype"):
        rope_kv_write(qkv, None, cos_sin, slots.float(), keys, values, EPS)
    with pytest.raises(TypeError, match="v_pages: must have the dtype"):
        rope_kv_write(qkv, None, cos_sin, slots, keys, values.bfloat16(), EPS)
    with pytest.raises(ValueError, match="k_pages: must be contiguous"):
        rope_kv_write(qkv, None, cos_sin, slots, keys[:, ::2], values[:, ::2].contiguous(), EPS)
