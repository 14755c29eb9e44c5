"""Quantised weights: the formats as GGUF defines them, and products against torch, to the bit."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
import torch

from kernels.cpu import library
from kernels.dequantise import dequantised, factors, integers
from kernels.group_formats import FORMATS, GroupFormat
from kernels.group_layout import Parts
from kernels.grouped_weight import GroupedWeight, grouped_reference, round_rows
from kernels.linear import linear, pack_weight
from kernels.quantisers import QUANTISERS, quantise
from tests.families import paired
from tests.kernels.grouped_weights import KINDS, empty, numbers, random_weight
from tests.kernels.instruction_sets import need_compiled, use

DTYPES = [torch.bfloat16, torch.float32]
# Outputs and inputs that fill the last blocks and groups, and that do not; an odd number of groups.
SHAPES = [(33, 80), (40, 31), (70, 608), (96, 64), (1, 32), (160, 992), (17, 1)]
# The others have blocks and groups that the third one begins with.
EACH_SHAPE = pytest.mark.parametrize(
    ("outputs", "inputs"),
    [*SHAPES[:3], *(pytest.param(*shape, marks=pytest.mark.thorough) for shape in SHAPES[3:])],
)
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 130, 300)


def quantised(weight: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    """In memory that is full of ones, which must not matter."""
    outputs, inputs = weight.shape
    made = empty(FORMATS[name], outputs, inputs, dtype)
    made.write(0, weight)
    return made


def float32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def as_gguf(group: list[float], name: str) -> bytes:
    """A group of 32 as the reference code of GGUF writes it, number by number in float32."""
    if name == "q8_0":
        scale = float32(max(map(abs, group)) / 127)
        inverse = float32(1 / scale) if scale else 0.0
        scaled = [float32(x * inverse) for x in group]
        values = [math.floor(abs(x) + 0.5) * (-1 if x < 0 else 1) for x in scaled]
        return struct.pack("<e32b", scale, *values)
    largest = max(group, key=abs)
    scale = float32(largest / -8)
    inverse = float32(1 / scale) if scale else 0.0
    halves = [min(15, int(float32(float32(x * inverse) + 8.5))) for x in group]
    return struct.pack("<e16B", scale, *(halves[i] | halves[i + 16] << 4 for i in range(16)))


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_quantised_rows_are_those_of_gguf(name: str) -> None:
    rows = torch.cat([numbers(40, 96), torch.zeros(1, 96), numbers(3, 96) * 1e-4])
    rows[3, 40:50] = rows[3, 39] = 2.5  # several largest ones
    rows[4, :32] = torch.arange(-16, 16) / 2.0  # halves
    written = [[as_gguf(row[first : first + 32], name) for first in (0, 32, 64)] for row in rows.tolist()]
    raw = torch.tensor([list(b"".join(groups)) for groups in written], dtype=torch.uint8)
    expected = empty(FORMATS[name], 44, 96)
    expected.write_blocks(0, raw)
    assert torch.equal(quantised(rows, name).data, expected.data)


@pytest.mark.parametrize("name", QUANTISERS)
@EACH_SHAPE
def test_rows_are_near_those_that_were_written(outputs: int, inputs: int, name: str) -> None:
    plain = numbers(outputs, inputs)
    weight = quantised(plain[: outputs // 2 + 1], name)
    again = empty(FORMATS[name], outputs, inputs)
    # In parts that begin within a block.
    for first in range(0, outputs, 7):
        assert again.write(first, plain[first : first + 7]).isfinite().all()
    assert torch.equal(again.dense()[: weight.shape[0]], weight.dense())
    # Half a step, and at the ends of what values can be a whole one; a scale is rounded.
    scales, _ = factors(again.form, again.parts(torch.arange(outputs)))
    if again.form.subscales:
        # As if a step was one of those over 8 standard deviations.
        step = 8 / ((1 << again.form.bits) - 1)
        assert (again.dense() - plain).norm() <= step / 12**0.5 * plain.numel() ** 0.5
        return
    steps = scales.abs().repeat_interleave(32, 1)[:, :inputs]
    within = steps * (0.5 if name == "q8_0" else 1.0) + plain.abs() * 2**-10
    assert ((again.dense() - plain).abs() <= within).all()


def squares(rows: torch.Tensor, parts: Parts, form: GroupFormat) -> float:
    return float((dequantised(form, parts)[:, : rows.shape[1]] - rows.float()).square().sum())


@pytest.mark.parametrize("name", QUANTISERS)
def test_compiled_quantisers_have_the_bits_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiled()
    form = FORMATS[name]
    rows = torch.cat(
        [
            numbers(60, 512) * 0.02,
            *(scale * numbers(3, 512, seed=1) for scale in (1e-25, 1e-7, 0.0, 1e4)),
            torch.full((1, 512), 0.3),
            torch.full((1, 512), -0.3),
            numbers(9, 512, seed=2) ** 5,
        ]
    )
    rows[3, :32], rows[4, 5] = 0.0, 7.0
    cases = [rows.to(dtype)[:, :inputs] for dtype in DTYPES for inputs in (512, 480, 70, 17)]
    compiled = [quantise(case, form) for case in cases]
    monkeypatch.setattr(library, "available", lambda: False)
    for case, found in zip(cases, compiled, strict=True):
        expected = quantise(case, form)
        assert torch.equal(found.values, expected.values)
        assert found.factors().keys() == expected.factors().keys()
        for part, other in zip(found.factors().values(), expected.factors().values(), strict=True):
            assert torch.equal(part, other)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_no_other_scale_is_much_better(name: str) -> None:
    """A search is not worse than the plain rule: the ends of a group are the ends of what values can be."""
    form, rows = FORMATS[name], numbers(64, 512) * 0.02
    found = quantise(rows, form)
    groups = rows.view(64, -1, 32 // form.subscales)
    if form.minima:
        low = groups.amin(2, keepdim=True).clamp(max=0)
        steps = (groups.amax(2, keepdim=True) - low) / ((1 << form.bits) - 1)
    else:
        low, steps = torch.zeros(()), groups.abs().amax(2, keepdim=True) / (form.offset - 1)
    plain = ((groups - low) / steps).round() * steps + low
    assert squares(rows, found, form) < 0.97 * float((plain - groups).square().sum())


@pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
@EACH_SHAPE
def test_rows_have_the_bits_of_torch(outputs: int, inputs: int, form: GroupFormat) -> None:
    weight = random_weight(form, outputs, inputs)
    index = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(weight.rows(index), dequantised(form, weight.parts(index))[:, :inputs])
    for wrong in (-outputs - 1, outputs):
        with pytest.raises(IndexError):
            weight.rows(torch.tensor([0, wrong]))


def test_what_is_not_finite_shows_in_the_scales() -> None:
    for name in QUANTISERS:
        for wrong in (math.nan, math.inf, -math.inf, 1e30):
            rows = numbers(3, 64)
            rows[1, 40] = wrong
            finite = quantised(rows, name).write(0, rows).isfinite()
            assert finite[[0, 2]].all() and not finite[1].all()


@pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
@EACH_SHAPE
def test_products_are_those_of_torch_to_the_bit(outputs: int, inputs: int, form: GroupFormat) -> None:
    for dtype in DTYPES:
        weight = random_weight(form, outputs, inputs, dtype)
        x = numbers(300, inputs + 9, dtype=dtype, seed=1)[:, 9:]  # strided
        x[5, :32], x[6, 0], x[7, 0], x[8] = 0.0, math.nan, math.inf, 1e-35
        for bias in (None, numbers(outputs, dtype=dtype, seed=2)):
            expected = grouped_reference(x, weight, bias)
            for rows in ROWS:
                found = linear(x[:rows], weight, bias)
                assert found.dtype is dtype
                assert torch.equal(found.nan_to_num(7e7), expected[:rows].nan_to_num(7e7)), rows
            assert expected[6:8].isnan().all() and expected[8:].isfinite().all()


@pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
def test_extremes_do_not_saturate(form: GroupFormat) -> None:
    """All values at their limits: sums are as large as they can be."""
    most = (1 << form.bits) - 1
    for value in (0, most):
        weight = random_weight(form, 16, 256)
        parts = weight.parts(torch.arange(16))
        parts.values.fill_(value)
        weight.write_parts(0, parts)
        for x in (torch.full((33, 256), 2.0), torch.full((33, 256), -2.0)):
            products = weight.dense().double() * x[0].double()
            allowed = 256 * 2**-22 * products.abs().sum(1) + 1e-3
            for rows in (3, 9, 33):
                found = linear(x[:rows], weight)
                assert torch.equal(found, grouped_reference(x[:rows], weight, None)), rows
                assert ((found.double() - products.sum(1)).abs() <= allowed).all(), rows


@pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
def test_rounded_rows_are_near(form: GroupFormat) -> None:
    """Against the dequantised weight in float64: a product is off by what rounding a row is off by."""
    weight, x = random_weight(form, 64, 256), numbers(9, 256, seed=1)
    scales, values = round_rows(x)
    rounded = (scales[:, :, None] * values).flatten(1).double()
    assert ((rounded - x).abs() <= scales.repeat_interleave(32, 1) * 0.5001).all()
    # Of scaled values and minima apart, which may cancel each other.
    parts = weight.parts(torch.arange(64))
    of_groups, minima = factors(form, parts)
    sizes = integers(form, parts).view(*of_groups.shape, -1).abs() * of_groups.abs()[:, :, None]
    sizes += 0 if minima is None else minima.abs()[:, :, None]
    allowed = 256 * 2**-22 * (rounded.abs() @ sizes.flatten(1).double().T)
    assert ((linear(x, weight).double() - rounded @ weight.dense().double().T).abs() <= allowed).all()


def unrounded(form: GroupFormat) -> GroupFormat:
    return dataclasses.replace(form, rounds_rows=False)


@pytest.mark.parametrize("form", KINDS, ids=lambda form: form.name)
@EACH_SHAPE
def test_products_of_unrounded_rows_have_the_bits_of_the_dequantised_weight(
    outputs: int, inputs: int, form: GroupFormat
) -> None:
    """In float32, also where rows are bfloat16; and they are near those of float64."""
    need_compiled()
    dense = random_weight(form, outputs, inputs).dense()
    packed = pack_weight(dense)
    for dtype in DTYPES:
        weight = random_weight(unrounded(form), outputs, inputs, dtype)
        x = numbers(300, inputs + 9, dtype=dtype, seed=1)[:, 9:]  # strided
        x[5, :32], x[6, 0], x[7, 0], x[8] = 0.0, math.nan, math.inf, 1e-42
        for bias in (None, numbers(outputs, dtype=dtype, seed=2)):
            expected = linear(x.float(), packed, None if bias is None else bias.float()).to(dtype)
            for rows in ROWS:
                found = linear(x[:rows], weight, bias)
                assert found.dtype is dtype
                assert torch.equal(found.nan_to_num(7e7), expected[:rows].nan_to_num(7e7)), rows
    x = numbers(300, inputs, seed=1)
    exact, sizes = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    found = linear(x, random_weight(unrounded(form), outputs, inputs))
    # One rounding for each input.
    assert ((found.double() - exact).abs() <= inputs * 2**-24 * 1.001 * sizes).all()


# What is done with the rows is the same for all forms, and so are forms for all rows.
@pytest.mark.parametrize(
    ("form", "rounds_rows"), paired(KINDS, [True, False]), ids=lambda value: getattr(value, "name", None)
)
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_threads(
    form: GroupFormat, rounds_rows: bool
) -> None:
    need_compiled()
    form = form if rounds_rows else unrounded(form)
    weight, x = random_weight(form, 1030, 992), numbers(300, 992, seed=1)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows], weight), alone[:rows])


# What these products are compiled of.
_SOURCES = ("grouped_product.cpp", "dequantised_product.cpp", "write_values.cpp", "threads.cpp")


# Each is compiled for its test, at a level that takes half the time. Products of this CPU's set, which always
# run, are compared with torch too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=() if each.name == "avx2" else pytest.mark.thorough)
        for each in library.X86_SETS
    ],
)
def test_bits_are_the_same_on_each_instruction_set(name: str, request: pytest.FixtureRequest) -> None:
    """On those that this CPU has, and emulated on the others; torch is the measure for all of them.

    Of rows that are not rounded, this CPU's own products are.
    """
    need_compiled()
    lacks = {each.name: each.cpu_flags for each in library.X86_SETS}[name] - library.cpu_flags()
    if lacks and not library.X86_SETS[-1].cpu_flags <= library.cpu_flags():
        pytest.skip("needs AVX2")
    whole = {
        (form, dtype): linear(numbers(40, 80, dtype=dtype), random_weight(unrounded(form), 33, 80, dtype))
        for form in KINDS
        for dtype in DTYPES
    }
    level = "-O3" if request.config.getoption("--thorough") else "-O1"
    with use(f"emulated-{name}" if lacks else name, _SOURCES, level):
        for (form, dtype), expected in whole.items():
            weight = random_weight(unrounded(form), 33, 80, dtype)
            assert torch.equal(linear(numbers(40, 80, dtype=dtype), weight), expected)
        for form in KINDS:
            for outputs, inputs in SHAPES:
                weight, x = random_weight(form, outputs, inputs), numbers(140, inputs, seed=1)
                expected = grouped_reference(x, weight, None)
                for rows in (1, 3, 4, 8, 140):
                    assert torch.equal(linear(x[:rows], weight), expected[:rows])
