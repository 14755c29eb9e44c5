"""Quantised weights as a GPU has them: what they stand for, and their products, against those of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from kernels import gpu_weight
from kernels.dequantise import dequantised
from kernels.few_rows import NormBefore, few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, Tiles, tiles_for
from kernels.float8_weight import Float8Format
from kernels.gated_activation import gated_activation_reference
from kernels.gpu_weight import GpuWeight
from kernels.group_formats import FORMATS, GroupFormat, integer_groups
from kernels.linear import DenseWeight, linear
from kernels.permuted_weight import PermutedWeight
from kernels.rms_norm import rms_norm_reference
from kernels.stacked_weight import StackedWeight
from tests.families import paired
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.poison import same_bits, surrounded
from tests.kernels.cuda.test_batch_invariance_cuda import products_of_rows, random_batches
from tests.kernels.cuda.test_few_rows_cuda import DTYPES, squares_of
from tests.kernels.grouped_weights import KINDS, numbers, random_weight
from tests.kernels.test_float8_weight import every_byte

__all__ = ["products_of_rows"]

# What differs in the code of a tile: 4 and 8 bits, parts of a group with scales of their own, minima, zero
# points, tables, and the dtypes of scales.
DIFFERING = [
    *(FORMATS[name] for name in ("q8_0", "q4_1", "q2_k", "q4_k", "q6_k", "iq4_xs")),
    integer_groups(4, 128, torch.float16, zeros=True),
    integer_groups(8, 0, torch.bfloat16, zeros=False),
    integer_groups(3, 64, torch.bfloat16, zeros=False, minima=True),
]
EPS = 1e-6


def named(value: object) -> str | None:
    return value.name if isinstance(value, GroupFormat) else None


def bytes_on(device: str) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.full((size,), 0xFF, dtype=torch.uint8, device=device)


def written(
    form: GroupFormat, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> tuple[GpuWeight, torch.Tensor]:
    """A weight with any numbers, written in parts, and what it stands for in float32."""
    source = random_weight(form, outputs, inputs)
    weight = GpuWeight(outputs, inputs, dtype, form, bytes_on(device))
    for rows in torch.split(torch.arange(outputs), 13):
        weight.write_parts(int(rows[0]), source.parts(rows))
    return weight, dequantised(form, source.parts(torch.arange(outputs)))[:, :inputs]


def assert_elements(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """A device may fuse a product and a sum, which the definition rounds one by one in float32."""
    rounding = 2**-23 + DTYPES[actual.dtype]
    sizes = expected.abs() + 2 * expected.abs().amax(1, keepdim=True) * 2**-23
    assert ((actual.cpu().float() - expected).abs() <= rounding * sizes + 2**-24).all()


def assert_products(actual: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor) -> None:
    """Sums in float32 of the elements [O, I] in the dtype of x, in any order, and one rounding."""
    x, dense, bias = (each.cpu().double() for each in (x, dense, bias))
    exact = x @ dense.T + bias
    sums = x.abs() @ dense.abs().T + bias.abs()
    allowed = dense.shape[1] * 2**-24 * sums + DTYPES[actual.dtype] * exact.abs()
    assert ((actual.cpu().double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("form", "outputs", "inputs"), paired(KINDS, [(33, 544), (17, 40)], mark=SELDOM), ids=named
)
def test_elements_are_those_of_the_format(form: GroupFormat, outputs: int, inputs: int, device: str) -> None:
    weight, expected = written(form, outputs, inputs, torch.float32, device)
    assert_elements(weight.dense(), expected)
    chosen = torch.tensor([outputs - 1, 0, outputs // 2], device=device)
    assert same_bits(weight.rows(chosen), weight.dense()[chosen])
    weight.dtype = torch.bfloat16
    assert_elements(weight.dense(), expected)


@pytest.mark.parametrize("scale_inputs", [0, 32, 96, 128, 768])
def test_elements_of_8_bit_floats(scale_inputs: int, device: str) -> None:
    values, inputs = every_byte(40, 800), 800
    scales = numbers(40, -(-inputs // (scale_inputs or inputs)))
    weight = GpuWeight(40, inputs, torch.float32, Float8Format(scale_inputs), bytes_on(device))
    assert weight.write_values(0, values, scales).isfinite().all()
    spread = scales.repeat_interleave(scale_inputs or inputs, 1)[:, :inputs]
    assert torch.equal(weight.dense().cpu(), values.float() * spread)
    values[3, 5] = torch.nan
    assert not weight.write_values(0, values, scales).isfinite().all()


@pytest.mark.parametrize("taken", [range(256), range(256, 544), range(96, 192)])
@pytest.mark.parametrize("form", [*DIFFERING, Float8Format(128)], ids=named)
def test_a_part_of_the_inputs(form: GroupFormat | Float8Format, taken: range, device: str) -> None:
    """As ranks have them."""
    weight = GpuWeight(20, 544, torch.float32, form, bytes_on(device), taken)
    if isinstance(form, Float8Format):
        values, scales = every_byte(20, 544), numbers(20, 5)
        weight.write_values(0, values, scales)
        expected = values.float() * scales.repeat_interleave(128, 1)[:, :544]
    else:
        source = random_weight(form, 20, 544)
        parts = source.parts(torch.arange(20))
        weight.write_parts(0, parts.cut(form, taken))
        expected = dequantised(form, parts)
    assert_elements(weight.dense(), expected[:, taken.start : taken.stop])


ALL_ROWS = ((1, False), (MOST_ROWS, False), (40, False), (3, True))


# A tile of few rows of each format; other numbers of rows with formats that differ most.
@pytest.mark.parametrize(
    ("form", "dtype", "batches"),
    [(form, torch.bfloat16, ALL_ROWS[1:2]) for form in DIFFERING]
    + [(DIFFERING[0], torch.float16, ALL_ROWS), (DIFFERING[3], torch.float32, ALL_ROWS)],
    ids=named,
)
def test_products(
    form: GroupFormat,
    dtype: torch.dtype,
    batches: Sequence[tuple[int, bool]],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few rows, and of more, for which some rows of the weight are dequantised at a time."""
    outputs, inputs = 150, 296
    weight, _ = written(form, outputs, inputs, dtype, device)
    # So small that there are two parts.
    monkeypatch.setattr(gpu_weight, "SCRATCH_BYTES", 128 * inputs * dtype.itemsize)
    bias = numbers(outputs, dtype=dtype).to(device)
    for rows, batch_invariant in batches:
        x = surrounded(numbers(rows, inputs, dtype=dtype, seed=rows), device)
        actual = linear(x, weight, bias, batch_invariant=batch_invariant)
        assert actual.dtype is dtype
        assert_products(actual, x, weight.dense(), bias)


PRODUCTS = [
    (dtype, tiles)
    for dtype in (torch.bfloat16, torch.float32)
    for tiles in tiles_for(dtype, None, quantised=True)
]


@pytest.mark.parametrize(("dtype", "tiles"), PRODUCTS, ids=str)
@pytest.mark.parametrize("form", DIFFERING[3:4], ids=named)
def test_what_is_around_a_product(form: GroupFormat, dtype: torch.dtype, tiles: Tiles, device: str) -> None:
    """A norm before it, a gate or a residual after it: as with the dequantised weight."""
    outputs, inputs, rows = 40, 296, 5
    weight, _ = written(form, 2 * outputs, inputs, dtype, device)
    # So that activations are neither 0 nor 1 everywhere.
    dense = weight.dense()
    x, scale = numbers(rows, inputs, dtype=dtype), numbers(inputs, dtype=dtype, seed=1)
    x = (x.float() / dense.cpu().float().pow(2).sum(1).max().sqrt()).to(dtype)
    before = NormBefore(scale.to(device), EPS, squares_of(x).to(device))
    normed = rms_norm_reference(x.to(device), before.weight, EPS)
    loss = inputs * 2**-24 + 4 * DTYPES[dtype]

    plain, _ = few_rows_product(
        x.to(device), weight.data, None, tiles, norm=before, quantised=weight.quantised
    )
    sums = normed.abs().double() @ dense.abs().double().T
    exact = normed.double() @ dense.double().T
    assert ((plain.double() - exact).abs() <= loss * sums).all()

    residual = numbers(rows, 2 * outputs, dtype=dtype, seed=2).to(device)
    added, squares = few_rows_product(
        normed, weight.data, None, tiles, residual=residual.clone(), quantised=weight.quantised
    )
    assert squares is not None
    assert ((added.double() - residual.double() - exact).abs() <= loss * (sums + residual.abs())).all()
    torch.testing.assert_close(
        squares.double().sum(0)[:rows], added.double().pow(2).sum(1), rtol=1e-4, atol=0
    )

    for gated in tiles_for(dtype, "silu", quantised=True):
        actual, _ = few_rows_product(
            x.to(device), weight.data, None, gated, activation="silu", quantised=weight.quantised
        )
        both = x.double() @ dense.cpu().double().T
        expected = gated_activation_reference(both, "silu")
        torch.testing.assert_close(
            actual.cpu().double(), expected, rtol=8 * DTYPES[dtype], atol=8 * DTYPES[dtype]
        )


@pytest.mark.parametrize("form", DIFFERING[3:4], ids=named)
def test_bits_of_a_row_do_not_depend_on_the_others(form: GroupFormat, device: str) -> None:
    """With any number of them in a batch-invariant model, else with up to 16; also beside NaN."""
    weight, _ = written(form, 40, 296, torch.bfloat16, device)
    x = numbers(40, 296, dtype=torch.bfloat16).to(device)
    x[3] = torch.nan
    together = linear(x, weight, None, batch_invariant=True)
    few = linear(x[:MOST_ROWS], weight, None)
    for rows in random_batches(random.Random(1), len(x)):
        assert same_bits(linear(x[rows], weight, None, batch_invariant=True), together[rows])
    for rows in random_batches(random.Random(2), MOST_ROWS):
        assert same_bits(linear(x[rows], weight, None), few[rows])


def test_weights_of_several_formats_and_in_another_order(device: str) -> None:
    first, _ = written(FORMATS["q4_k"], 40, 512, torch.float32, device)
    second, _ = written(FORMATS["q6_k"], 24, 512, torch.float32, device)
    dense = DenseWeight(numbers(8, 512).to(device))
    stacked = StackedWeight([first, second, dense])
    x, bias = numbers(3, 512).to(device), torch.zeros(72, device=device)
    assert_products(linear(x, stacked, bias), x, stacked.dense(), bias)
    rows = torch.tensor([71, 0, 41], device=device)
    assert same_bits(stacked.rows(rows), stacked.dense()[rows])
    ordered = PermutedWeight(first)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    plain = first.dense()
    ordered.reorder(order)
    assert same_bits(ordered.dense()[:, order.to(device)], plain)
    assert_products(linear(x, ordered, bias[:40]), x, ordered.dense(), bias[:40])


def test_a_weight_takes_what_it_has_in_memory(device: str) -> None:
    """Values of 4 and 8 bits; scales as the format has them."""
    bits = {"q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.625, "q6_k": 8.5625, "q2_k": 4.625, "iq4_xs": 4.3125}
    for name, each in bits.items():
        weight = GpuWeight(64, 4096, torch.bfloat16, FORMATS[name], bytes_on(device))
        assert weight.nbytes == 64 * 4096 * each / 8
