"""Projections from packed weights against the plain ones."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import linear as cpu
from kernels.linear import can_pack, linear, linear_reference, pack_weight
from tests.kernels.instruction_sets import need_packed_products


def sum_loss(inputs: int) -> float:
    """What a sum of `inputs` products of standard normal values loses in float32.

    Partial sums are sqrt(inputs) in size, and below 5 times that. Each of `inputs` additions rounds by 2^-24
    of one, up or down: together that is sqrt(inputs) times as much, and below 5 times that again.
    """
    return 25 * inputs * 2**-24


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 8, 9, 32, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (33, 80), (1, 48), (1024, 257), (200, 1030)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_bfloat16_is_as_exact_as_plain(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    actual = linear(x, pack_weight(weight), bias)
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.shape == (rows, outputs) and actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=sum_loss(inputs))


def test_few_rows_are_multiplied_by_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    need_packed_products()
    weight = pack_weight(torch.randn(200, 96).bfloat16())
    x = torch.randn(cpu.MOST_ROWS + 1, 192).bfloat16()[:, 96:]  # strided
    multiplied: list[int] = []
    multiply = cpu.multiply

    def record(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiplied.append(len(x))
        return multiply(x, weight, bias)

    monkeypatch.setattr(cpu, "multiply", record)
    alone = torch.cat([linear(row[None], weight) for row in x])
    assert torch.equal(linear(x[:-1], weight), alone[:-1]), "bits of a row depend on the rows beside it"
    linear(x, weight)
    assert multiplied == [1] * len(x) + [cpu.MOST_ROWS]


def test_a_layout_that_is_not_understood_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_packed_bytes", lambda values: values.flatten())
    cpu.understands_layout.cache_clear()
    try:
        assert not cpu.understands_layout()
        weight, x = torch.randn(64, 32).bfloat16(), torch.randn(2, 32).bfloat16()
        actual, expected = linear(x, pack_weight(weight)), linear(x, weight)
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2 * sum_loss(32))  # both are rounded
    finally:
        cpu.understands_layout.cache_clear()


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
