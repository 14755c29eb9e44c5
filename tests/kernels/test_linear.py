"""Projections from packed weights against the plain ones."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import can_pack, linear, linear_reference, pack_weight


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 80), (1, 48), (1024, 257)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_bfloat16_is_as_exact_as_plain(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    actual = linear(x, pack_weight(weight), bias)
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.shape == (rows, outputs) and actual.dtype is torch.bfloat16
    # One rounding to bfloat16, and sums in float32 in another order.
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-4 * inputs**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_plain(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 16).to(dtype)
    assert pack_weight(weight) is weight
    x = torch.randn(3, 16).to(dtype)
    assert torch.equal(linear(x, weight), linear_reference(x, weight))


def test_packing_twice_changes_nothing() -> None:
    packed = pack_weight(torch.randn(8, 16).bfloat16())
    assert not can_pack(packed)
    assert pack_weight(packed) is packed


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="x"):
        linear(torch.randn(2, 15), torch.randn(8, 16))
