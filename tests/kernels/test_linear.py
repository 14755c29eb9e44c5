"""Projections from packed weights against float64, and their bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.linear import linear, pack_weight
from kernels.packed_weight import PackedWeight
from tests.kernels.instruction_sets import need_compiled

DTYPES = {torch.bfloat16: 2**-8, torch.float32: 2**-23}
# Widths that fill the last blocks, and that do not; an odd number of inputs.
SHAPES = [(96, 64), (33, 80), (1, 48), (1024, 257), (200, 1030), (17, 1), (96, 32), (64, 16), (40, 31)]


# By turns with a bias and without.
BIASED = [
    pytest.param(*shape, biased, marks=() if biased == bool(index % 2) else pytest.mark.thorough)
    for index, shape in enumerate(SHAPES)
    for biased in (False, True)
]


def sum_loss(inputs: int) -> float:
    """What a sum of `inputs` products of standard normal values loses in float32.

    Partial sums are sqrt(inputs) in size, and below 5 times that. Each of `inputs` additions rounds by 2^-24
    of one, up or down: together that is sqrt(inputs) times as much, and below 5 times that again.
    """
    return 25 * inputs * 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 6, 7, 32, 300])
@pytest.mark.parametrize(("outputs", "inputs", "biased"), BIASED)
def test_packed_weights_are_as_exact_as_plain_ones(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    actual = linear(x, pack_weight(weight), bias)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.shape == (rows, outputs) and actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=DTYPES[dtype], atol=sum_loss(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_threads(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    need_compiled()
    weight = pack_weight(torch.randn(outputs, inputs).to(dtype))
    x = torch.randn(300, inputs + 96).to(dtype)[:, 96:]  # strided
    alone = torch.cat([linear(row[None], weight) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (2, 3, 4, 5, 6, 7, 8, 13, 32, 300):
            assert torch.equal(linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_nan_stays_alone_and_zeros_that_fill_up_do_not_count(dtype: torch.dtype) -> None:
    need_compiled()
    weight = pack_weight(torch.randn(33, 47).to(dtype))
    # What is beside the rows in memory is not read.
    x = torch.full((7, 64), torch.nan, dtype=dtype)[:, 8:55]
    x.copy_(torch.randn(7, 47))
    clean = linear(x, weight)
    x[3] = torch.nan
    poisoned = linear(x, weight)
    others = [row for row in range(7) if row != 3]
    assert clean.isfinite().all()
    assert poisoned[3].isnan().all() and torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (4096, 1056)])
def test_a_packed_weight_can_be_unpacked(
    outputs: int, inputs: int, in_place: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    before = weight.clone()
    packed = PackedWeight(weight, in_place=in_place)
    assert torch.equal(packed.dense(), before)
    if in_place and (outputs, inputs) == (4096, 1056):
        assert packed.data.data_ptr() == weight.data_ptr(), "it is in memory twice"
    elif not in_place:
        assert torch.equal(weight, before)


def test_a_dtype_without_a_kernel_stays_plain() -> None:
    weight = torch.randn(8, 16).half()
    plain = pack_weight(weight)
    assert plain.plain is weight
    x = torch.randn(3, 16).half()
    assert torch.equal(linear(x, plain), functional.linear(x, weight))


def test_packing_twice_changes_nothing() -> None:
    need_compiled()
    packed = pack_weight(torch.randn(8, 16).bfloat16())
    assert packed.packed() is packed
